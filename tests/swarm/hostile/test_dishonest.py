"""The kit itself: a dishonest program is a real peer, and its lie takes effect."""

from tests.swarm.hostile.dishonest import replace
from thinpipe.core.events import Step


def claims_a_low_loss():
    from thinpipe.swarm.peer.remote_run import RemoteRun

    def lie(honest, run, event):
        import msgspec

        return honest(run, msgspec.structs.replace(event, loss=0.125) if isinstance(event, Step) else event)

    replace(RemoteRun, "on_event", lie)


def test_a_dishonest_peer_trains_and_lies(start_hub, join_dishonestly):
    hub, invites = start_hub(1)
    join_dishonestly(invites[0], "mallory", claims_a_low_loss)
    hub.until(r"loss: +0\.1250")
