"""Size of a message on the wire, as interface counters see it: gloo over TCP, IPv4 and Ethernet.

Not counted: traffic in the opposite direction, which is gloo's notice that a receive is posted and TCP acknowledgements
(measured: 2.4 % of a stream of large messages, less if data in the opposite direction carries the acknowledgements).
"""

ETHERNET_HEADER_NBYTES = 14
"""Two addresses and a type. Interface counters do not include preamble and checksum."""
IP_HEADER_NBYTES = 20
"""IPv4 (RFC 791) without options."""
TCP_HEADER_NBYTES = 32
"""RFC 9293: 20 bytes, plus 12 for timestamps (RFC 7323), which are negotiated by default."""
MTU_NBYTES = 1500
"""The largest IP packet that an Ethernet frame carries."""
GLOO_HEADER_NBYTES = 48
"""Six 64-bit fields (`gloo::transport::tcp::Op`): in front of each message, and once more by itself to announce it."""

SEGMENT_NBYTES = MTU_NBYTES - IP_HEADER_NBYTES - TCP_HEADER_NBYTES
FRAME_HEADERS_NBYTES = ETHERNET_HEADER_NBYTES + IP_HEADER_NBYTES + TCP_HEADER_NBYTES


def wire_nbytes(payload_nbytes: int) -> int:
    """Bytes on the wire of a gloo message: its announcement in a separate frame, then header and payload in frames of
    1514 bytes that carry 1448 each."""
    return framed_nbytes(GLOO_HEADER_NBYTES) + framed_nbytes(GLOO_HEADER_NBYTES + payload_nbytes)


def framed_nbytes(stream_nbytes: int) -> int:
    """Bytes on the wire of `stream_nbytes` bytes of a TCP stream, sent in full frames except for the last."""
    frames = -(-stream_nbytes // SEGMENT_NBYTES)
    return stream_nbytes + frames * FRAME_HEADERS_NBYTES
