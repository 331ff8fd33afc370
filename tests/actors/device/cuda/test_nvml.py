"""What is said of the GPUs of a machine, from a library that is made up."""

from dataclasses import dataclass

import pytest

from actors.device.cuda.nvml import NvmlDevice, NvmlDevices, listed_gpus

CARD = NvmlDevice("NVIDIA H200", "GPU-aa11", (9, 0), 150 << 30)
OTHER = NvmlDevice("NVIDIA A100-SXM4-80GB", "GPU-ab22", (8, 0), 80 << 30)


@dataclass
class MadeUp:
    """The library's calls, each on the numbers and rooms that it is given by reference."""

    cards: tuple = (CARD, OTHER)
    version: int = 13020
    failing: str = ""
    is_open: bool = False

    def __getattr__(self, name):
        def call(*arguments):
            if name == self.failing:
                return 999
            getattr(self, f"_{name}")(*arguments)
            return 0

        return call

    def _nvmlInit_v2(self):  # the library's name
        self.is_open = True

    def _nvmlShutdown(self):
        self.is_open = False

    def _nvmlSystemGetDriverVersion(self, room, size):
        room.value = b"580.65.06"

    def _nvmlSystemGetCudaDriverVersion_v2(self, version):
        version._obj.value = self.version

    def _nvmlDeviceGetCount_v2(self, count):
        count._obj.value = len(self.cards)

    def _nvmlDeviceGetHandleByIndex_v2(self, number, handle):
        handle._obj.value = 1000 + number.value

    def _card(self, handle):
        return self.cards[handle.value - 1000]

    def _nvmlDeviceGetMemoryInfo(self, handle, memory):
        memory._obj.total = self._card(handle).memory_bytes

    def _nvmlDeviceGetCudaComputeCapability(self, handle, major, minor):
        major._obj.value, minor._obj.value = self._card(handle).capability

    def _nvmlDeviceGetName(self, handle, room, size):
        room.value = self._card(handle).name.encode()

    def _nvmlDeviceGetUUID(self, handle, room, size):
        room.value = self._card(handle).uuid.encode()


def listed(library, **environ):
    found = listed_gpus(environ, lambda name: library)
    assert not library.is_open
    return found


def test_every_gpu_is_listed_with_the_driver_and_its_newest_cuda():
    assert listed(MadeUp()) == NvmlDevices((CARD, OTHER), "580.65.06", (13, 2))


@pytest.mark.parametrize(
    ("shown", "seen"),
    [
        ("1", (OTHER,)),
        ("1,0", (OTHER, CARD)),
        ("GPU-ab", (OTHER,)),
        ("0,7,1", (CARD,)),
        (" 1 , x, 0", (OTHER,)),
    ],
)
def test_what_is_hidden_from_cuda_is_not_listed(shown, seen):
    assert listed(MadeUp(), CUDA_VISIBLE_DEVICES=shown).gpus == seen


@pytest.mark.parametrize("shown", ["", "-1", "GPU-a", "GPU-cc"])
def test_a_variable_that_hides_every_gpu_is_named(shown):
    found = listed(MadeUp(), CUDA_VISIBLE_DEVICES=shown)
    assert found.gpus == ()
    assert found.problem == f"CUDA_VISIBLE_DEVICES={shown} hides all of 2 GPUs"


def test_a_machine_without_a_driver_says_which_library_is_missing():
    def load(name):
        raise OSError(name)

    assert listed_gpus({}, load) == NvmlDevices(
        problem="no NVIDIA driver is here: there is no libnvidia-ml.so.1"
    )


def test_a_driver_that_does_not_answer_is_no_error():
    assert listed(MadeUp(failing="nvmlInit_v2")).problem == (
        "the NVIDIA driver does not answer: nvmlInit_v2 returned 999"
    )
    assert listed(MadeUp(failing="nvmlDeviceGetName")).problem == (
        "the NVIDIA driver does not say which GPUs there are: nvmlDeviceGetName returned 999"
    )


def test_a_driver_without_gpus_says_so():
    assert listed(MadeUp(cards=())).problem == "the NVIDIA driver has no GPU"


def test_a_machine_is_asked_through_the_library_that_drivers_install():
    asked = []

    def load(name):
        asked.append(name)
        return MadeUp()

    listed_gpus({}, load)
    assert asked == ["libnvidia-ml.so.1"]
