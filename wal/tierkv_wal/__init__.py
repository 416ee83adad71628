"""tierkv's write-ahead log: frames of opaque 64-byte records in preallocated segments.

    reader = WalReader(storage, directory, store_uuid, after_lsn)
    for frame in reader.frames():
        ...
    writer = reader.writer(epoch=reader.epoch + 1)
    writer.append(records)
    writer.write()
    writer.sync()

``wal/FORMAT.md`` describes the bytes.
"""

from tierkv_wal.errors import WalCorrupt, WalDead, WalError, WalMisuse, WalVersion
from tierkv_wal.format import FRAME_RECORDS_MAX, SEGMENT_BYTES, SLOT_BYTES
from tierkv_wal.reader import End, EndKind, Frame, WalReader
from tierkv_wal.simulated import SimulatedStorage
from tierkv_wal.storage import RealStorage, Storage
from tierkv_wal.writer import WalWriter

__all__ = [
    "FRAME_RECORDS_MAX",
    "SEGMENT_BYTES",
    "SLOT_BYTES",
    "End",
    "EndKind",
    "Frame",
    "RealStorage",
    "SimulatedStorage",
    "Storage",
    "WalCorrupt",
    "WalDead",
    "WalError",
    "WalMisuse",
    "WalReader",
    "WalVersion",
    "WalWriter",
]
