"""Reads and cuts Ethernet frames as Linux's packet sockets deliver them: before each frame there is a header that
describes its offloads (the work that is left to the network card).

Law: pure functions on bytes. TCP hands its packets to an interface as one long frame, with the length of each packet's
payload in the header (`virtio_net_hdr`); here such a frame counts as all the packets in it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

_OFFLOADS = struct.Struct("=BBHHHH")
"""Flags, kind of a long frame, header length, payload bytes of each packet, where the checksummed bytes begin, and how
far from there the checksum is."""
OFFLOADS_BYTES = _OFFLOADS.size
_ETHERNET_BYTES = 14
_LONG_TCP4, _KIND_MASK = 1, 0x7F
"""The kind of a long frame with TCP over IPv4; the highest bit of the field says whether TCP uses ECN."""
_FIN, _PSH, _CWR = 0x01, 0x08, 0x80


def addresses(frame: bytes) -> tuple[bytes, bytes]:
    """The MAC addresses of the frame's destination and of its source."""
    return frame[OFFLOADS_BYTES : OFFLOADS_BYTES + 6], frame[OFFLOADS_BYTES + 6 : OFFLOADS_BYTES + 12]


def packets(frame: bytes) -> int:
    """The number of packets in the frame. Only a long TCP frame has more than one."""
    shape = _shape(frame)
    return 1 if shape is None else shape[2]


def part(frame: bytes, first: int, end: int) -> bytes:
    """A frame with only some packets of the given frame: from packet `first` to the last packet before `end`."""
    shape = _shape(frame)
    if shape is None or (first == 0 and end >= shape[2]):
        return frame
    payload_at, each, count = shape
    flags, kind, header_bytes, _, checksum_at, checksum_in = _OFFLOADS.unpack_from(frame)
    payload = frame[payload_at + first * each : payload_at + end * each]
    if len(payload) <= each:
        kind = each = 0
    header = bytearray(frame[OFFLOADS_BYTES:payload_at])
    _describe(header, first, shape[1], len(payload), last=end >= count)
    return _OFFLOADS.pack(flags, kind, header_bytes, each, checksum_at, checksum_in) + bytes(header) + payload


def survivors(frame: bytes, gap: Callable[[], int], until_loss: int) -> tuple[list[bytes], int]:
    """Remove the lost packets from a frame. Returns the frames that remain, and how many more packets arrive after this
    frame until the next loss. `until_loss`: how many packets arrive until the next loss, counted from the first packet
    of this frame. After each loss, `gap` draws this number anew."""
    count = packets(frame)
    if until_loss >= count:
        return [frame], until_loss - count
    kept, first = list[bytes](), 0
    while (lost := first + until_loss) < count:
        if lost > first:
            kept.append(part(frame, first, lost))
        first, until_loss = lost + 1, gap()
    if first < count:
        kept.append(part(frame, first, count))
    return kept, until_loss - (count - first)


def _shape(frame: bytes) -> tuple[int, int, int] | None:
    """For a long TCP frame: the position of its payload, the payload bytes of each packet, and the number of packets.
    None for any other frame."""
    _, kind, _, each, _, _ = _OFFLOADS.unpack_from(frame)
    if kind & _KIND_MASK != _LONG_TCP4 or not each:
        return None
    ip_at = OFFLOADS_BYTES + _ETHERNET_BYTES
    tcp_at = ip_at + 4 * (frame[ip_at] & 0x0F)
    payload_at = tcp_at + 4 * (frame[tcp_at + 12] >> 4)
    return payload_at, each, -(-(len(frame) - payload_at) // each)


def _describe(header: bytearray, first: int, each: int, payload_bytes: int, *, last: bool) -> None:
    """Adapt `header`, a copy of a long frame's headers, to a shorter frame that is cut from the long one. The shorter
    frame begins with packet `first` and has `payload_bytes` of payload. `each`: payload bytes of a packet; `last`:
    whether the long frame's last packet is included.

    TCP's checksum field then holds the sum of the pseudo header alone; the kernel adds the other bytes.
    """
    ip_at = _ETHERNET_BYTES
    tcp_at = ip_at + 4 * (header[ip_at] & 0x0F)
    (number,), (sequence,) = struct.unpack_from("!H", header, ip_at + 4), struct.unpack_from("!I", header, tcp_at + 4)
    struct.pack_into("!H", header, ip_at + 2, len(header) - ip_at + payload_bytes)
    struct.pack_into("!H", header, ip_at + 4, (number + first) & 0xFFFF)
    struct.pack_into("!H", header, ip_at + 10, 0)
    struct.pack_into("!H", header, ip_at + 10, 0xFFFF ^ _sum(header[ip_at:tcp_at]))
    struct.pack_into("!I", header, tcp_at + 4, (sequence + first * each) & 0xFFFFFFFF)
    header[tcp_at + 13] &= (0xFF if last else ~(_FIN | _PSH)) & (0xFF if not first else ~_CWR)
    pseudo = header[ip_at + 12 : ip_at + 20] + struct.pack(
        "!HH", header[ip_at + 9], len(header) - tcp_at + payload_bytes
    )
    struct.pack_into("!H", header, tcp_at + 16, _sum(pseudo))


def _sum(data: bytes | bytearray) -> int:
    """The 16-bit sum from which Internet checksums are made (RFC 1071). The number of bytes is even."""
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    total = (total & 0xFFFF) + (total >> 16)
    return (total & 0xFFFF) + (total >> 16)
