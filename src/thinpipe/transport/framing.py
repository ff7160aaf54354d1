"""How many bytes a message is on the wire: gloo over TCP, IPv4 and Ethernet, as interface counters see it.

Not counted: what travels the other way, which is gloo's notice that a receive is posted and TCP's acknowledgements
(measured: 2.4 % of a stream of large messages, less where data flows both ways and carries them along).
"""

ETHERNET_HEADER_NBYTES = 14
"""Two addresses and a type. Preamble and checksum are not in the counters of an interface."""
IP_HEADER_NBYTES = 20
"""IPv4 (RFC 791) without options."""
TCP_HEADER_NBYTES = 32
"""RFC 9293: 20 bytes, and 12 for the timestamps (RFC 7323) that both ends agree on by default."""
MTU_NBYTES = 1500
"""The largest IP packet that an Ethernet frame carries."""
GLOO_HEADER_NBYTES = 48
"""Six 64-bit fields (`gloo::transport::tcp::Op`), in front of each message, and alone as the notice that it comes."""

SEGMENT_NBYTES = MTU_NBYTES - IP_HEADER_NBYTES - TCP_HEADER_NBYTES
FRAME_HEADERS_NBYTES = ETHERNET_HEADER_NBYTES + IP_HEADER_NBYTES + TCP_HEADER_NBYTES


def wire_nbytes(payload_nbytes: int) -> int:
    """gloo's notice in a frame of its own, then the message in frames of 1514 bytes that carry 1448 each."""
    return framed_nbytes(GLOO_HEADER_NBYTES) + framed_nbytes(GLOO_HEADER_NBYTES + payload_nbytes)


def framed_nbytes(stream_nbytes: int) -> int:
    """So many bytes of a TCP stream, in full frames as far as they go."""
    frames = -(-stream_nbytes // SEGMENT_NBYTES)
    return stream_nbytes + frames * FRAME_HEADERS_NBYTES
