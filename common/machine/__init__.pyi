from common.machine.child_process import ChildProcess
from common.machine.cores import CoreShare, pin_to_cores, spin_briefly
from common.machine.files import (
    NO_ROOM,
    READ_S,
    UnreadableFile,
    is_full,
    nearest_existing,
    raise_file_limit,
    read_regular_file,
    write_failure,
)
from common.machine.gpus import (
    AvailableGPUs,
    count_gpus,
    find_gpus,
    find_gpus_here,
    gpu_refusal,
    placement_message,
    with_device,
)
from common.machine.memory import Available, host_memory, keep_large_buffers
from common.machine.memory_file import MemoryFile
from common.machine.owned_task import OwnedTask
from common.machine.private_folder import FOLDER_LOCK, PrivateFolder, remove_private_folders
from common.machine.process_metrics import register_process
from common.machine.wall_clock import AGES_S, LEASES_S, WALL_CLOCK, WallClock

__all__ = [
    "AGES_S",
    "Available",
    "AvailableGPUs",
    "ChildProcess",
    "CoreShare",
    "FOLDER_LOCK",
    "LEASES_S",
    "MemoryFile",
    "NO_ROOM",
    "OwnedTask",
    "PrivateFolder",
    "READ_S",
    "UnreadableFile",
    "WALL_CLOCK",
    "WallClock",
    "count_gpus",
    "find_gpus",
    "find_gpus_here",
    "gpu_refusal",
    "host_memory",
    "is_full",
    "keep_large_buffers",
    "nearest_existing",
    "pin_to_cores",
    "placement_message",
    "raise_file_limit",
    "read_regular_file",
    "register_process",
    "remove_private_folders",
    "spin_briefly",
    "with_device",
    "write_failure",
]
