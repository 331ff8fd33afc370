import threading

from actorflow.run.ports import OpenCall


class Source:
    def __init__(self):
        self.num_closed = 0

    def close(self):
        self.num_closed += 1


def test_a_fetch_that_has_its_answer_counts():
    fetching = OpenCall(Source())
    for _ in range(3):
        assert fetching.begin()
        assert fetching.is_inside
        assert fetching.settle()
        assert not fetching.is_inside


def test_a_fetch_that_was_given_up_no_longer_counts():
    fetching = OpenCall(Source())
    assert fetching.begin()
    assert fetching.abandon()
    assert not fetching.settle()
    assert not fetching.begin()


def test_between_two_fetches_there_is_nothing_to_give_up_but_the_next_one():
    fetching = OpenCall(Source())
    assert fetching.begin()
    assert fetching.settle()
    assert not fetching.abandon()
    assert not fetching.begin()


def test_only_a_source_that_is_fetching_is_closed():
    source = Source()
    fetching = OpenCall(source)
    fetching.close()
    assert source.num_closed == 0
    fetching.begin()
    fetching.close()
    assert source.num_closed == 1
    OpenCall(object()).close()


def test_of_answer_and_giving_up_exactly_one_counts_whatever_the_threads_do():
    """The one that counts ends the firing: two would end it twice, none would let it hang."""
    fetches = [OpenCall(Source()) for _ in range(5000)]
    answers, given_up = [], []
    gate = threading.Barrier(2)

    def answer():
        gate.wait(60)
        answers.extend([fetching.begin() and (True, fetching.settle()) for fetching in fetches])

    def give_up():
        gate.wait(60)
        given_up.extend([fetching.abandon() for fetching in fetches])

    threads = [threading.Thread(target=answer), threading.Thread(target=give_up)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for answer, was_given_up in zip(answers, given_up, strict=True):
        if answer:  # it began
            assert answer[1] != was_given_up
