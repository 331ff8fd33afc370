import threading

from actors.machine.errors import forkable_lock


def test_a_child_finds_a_lock_open_that_another_thread_of_its_parent_held(child_says):
    lock, is_held, may_go = forkable_lock(), threading.Event(), threading.Event()

    def hold():
        with lock:
            is_held.set()
            may_go.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait(60)

    def enter():
        with lock, lock:
            return "entered"

    assert child_says(enter) == "entered"
    may_go.set()
    thread.join()


def test_a_lock_that_the_forking_thread_holds_stays_its_own(child_says):
    lock = forkable_lock()
    entered = []

    def try_from_another_thread():
        def enter():
            with lock:
                entered.append(1)

        thread = threading.Thread(target=enter)
        thread.start()
        with lock:
            before = list(entered)
        lock.release()
        thread.join(60)
        return f"{before} {entered}"

    with lock:
        assert child_says(try_from_another_thread) == "[] [1]"
