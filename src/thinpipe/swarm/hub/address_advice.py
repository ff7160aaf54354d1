"""Says who can reach a hub, from its address alone: invites name an address that nobody may be able to dial."""

import ipaddress


def who_can_reach(address: str, host: str, port: int, *, is_chosen: bool) -> list[str]:
    """Sentences for the hub's owner; empty if address and port are such that everybody may reach them. `address`: as
    invites name it; `host`: where the hub listens; `is_chosen`: the owner has set this port."""
    lines = []
    if _kind(host) == "loopback":
        lines.append(f"the hub listens on {host}: only programs on this machine can join (hub.host)")
    elif _kind(address) == "loopback":
        lines.append(f"invites name {address}, which is every machine's own: only programs on this machine can join")
    elif _kind(address) == "private":
        lines.append(
            f"{address} is an address of a local network: only machines in it can join. For others set --hub.address "
            "to a public IP address or host name"
        )
    if not is_chosen:
        lines.append(
            f"port {port} was free and stays with this folder: where a router has to forward a port, choose it with "
            "--hub.port"
        )
    return lines


def _kind(address: str) -> str:
    """loopback, private, or empty for a public address and for a host name, of which nothing is known here."""
    if address == "localhost":
        return "loopback"
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return ""
    if found.is_loopback:
        return "loopback"
    return "" if found.is_global or found.is_unspecified else "private"
