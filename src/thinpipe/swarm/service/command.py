"""`thinpipe service`: installs, removes or shows the service of a folder."""

from thinpipe.config.hub import ServiceConfig
from thinpipe.swarm.service.definition import service_of
from thinpipe.swarm.service.managers import install, manager_of, remove, status


def run(config: ServiceConfig) -> None:
    service = service_of(config)
    act = {"install": install, "remove": remove, "status": status}[config.action]
    print(f"{service.title} ({service.name})")
    print(act(manager_of(service)))
