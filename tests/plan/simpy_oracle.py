"""The step of `planning/simulation/simulate.py` again, in simpy: processes that wait for each other, no event list."""

from itertools import pairwise

import simpy

from thinpipe.planning.simulation.links import nbytes_on_wire, pieces_of
from thinpipe.planning.simulation.schedule_actions import PassKind


class SimpyLink:
    def __init__(self, env, spec):
        self.spec = spec
        self.up = simpy.Resource(env, capacity=1)
        self.down = self.up if spec.duplex == "shared" else simpy.Resource(env, capacity=1)
        self.up.released = self.down.released = 0.0


class Host:
    """Cores that are shared equally by whoever computes, looked at anew whenever somebody begins or ends."""

    def __init__(self, env, cores):
        self.env, self.cores, self.work, self.begun = env, cores, {}, {}
        self.changed = env.event()
        env.process(self.run())

    def compute(self, seconds):
        done = self.env.event()
        self.begun[done] = seconds
        if not self.changed.triggered:
            self.changed.succeed()
        return done

    def run(self):
        while True:
            speed = min(1.0, self.cores / len(self.work)) if self.work else 1.0
            since = self.env.now
            first = self.env.timeout(min(self.work.values()) / speed) if self.work else self.env.event()
            yield first | self.changed
            self.work = {done: left - (self.env.now - since) * speed for done, left in self.work.items()} | self.begun
            self.changed, self.begun = self.env.event(), {}
            for done in [done for done, left in self.work.items() if left <= 1e-12]:
                del self.work[done]
                done.succeed()


class Oracle:
    def __init__(self, step_spec):
        self.step_spec, self.env = step_spec, simpy.Environment()
        self.links = [SimpyLink(self.env, spec) for spec in step_spec.links]
        self.hub = None if step_spec.hub is None else SimpyLink(self.env, step_spec.hub)
        count = len(step_spec.actions)
        hosts = step_spec.hosts or list(range(count))
        machines = {host: Host(self.env, (step_spec.cores or {}).get(host, count)) for host in set(hosts)}
        self.host = [machines[host] for host in hosts]
        self.home = {action.stage: process for process, actions in enumerate(step_spec.actions) for action in actions}
        self.mail, self.passes, self.ended = {}, {}, []
        self.contributions, self.answers = (
            [self.env.event() for _ in range(count)],
            [self.env.event() for _ in range(count)],
        )
        self.all_voted = simpy.AllOf(self.env, self.contributions)
        if step_spec.allreduce_nbytes and count > 1:
            self.env.process(self.sum())
        for process in range(count):
            self.env.process(self.run_process(process))
        self.env.run()

    def arrival(self, *name):
        return self.mail.setdefault(name, self.env.event())

    def run_process(self, process):
        last = len(self.step_spec.stage_times) - 1
        for stage, kind, microbatch in self.step_spec.actions[process]:
            work = self.step_spec.stage_times[stage]
            input_s, weight_s = (work.input_s, work.weight_s) if stage else (0.0, work.input_s + work.weight_s)
            if kind is PassKind.FORWARD and stage > 0:
                yield self.arrival("states", stage, microbatch)
            if kind in (PassKind.BACKWARD, PassKind.INPUT) and stage < last:
                yield self.arrival("gradients", stage, microbatch)
            start = self.env.now
            yield self.host[process].compute(
                {"F": work.forward_s, "B": input_s + weight_s, "I": input_s, "W": weight_s}[kind]
            )
            self.passes[process, stage, str(kind), microbatch] = start, self.env.now
            if kind is PassKind.FORWARD and stage < last:
                self.post(
                    process, stage + 1, self.step_spec.forward_nbytes, self.arrival("states", stage + 1, microbatch)
                )
            if kind in (PassKind.BACKWARD, PassKind.INPUT) and stage > 0:
                gradients = self.arrival("gradients", stage - 1, microbatch)
                self.post(process, stage - 1, self.step_spec.backward_nbytes, gradients)
        if self.step_spec.allreduce_nbytes and len(self.step_spec.actions) > 1:
            if self.hub is None and process == len(self.step_spec.actions) - 1:
                self.contributions[process].succeed()
            else:
                centre = self.links[-1] if self.hub is None else self.hub
                self.env.process(
                    self.travel(
                        self.route(self.links[process], centre, self.step_spec.allreduce_nbytes),
                        self.contributions[process],
                    )
                )
            yield self.answers[process]
        if self.step_spec.optimiser_s:
            yield self.host[process].compute(self.step_spec.optimiser_s[process])
        self.ended.append(self.env.now)

    def sum(self):
        yield self.all_voted
        last = len(self.links) - 1
        centre, others = (self.hub, last + 1) if self.hub is not None else (self.links[-1], last)
        gone = []
        for process in range(others):
            gone.append(self.env.event())
            route = self.route(centre, self.links[process], self.step_spec.allreduce_nbytes)
            self.env.process(self.travel(route, self.answers[process], gone[-1]))
        if self.hub is None:
            yield simpy.AllOf(self.env, gone)
            self.answers[last].succeed()

    def post(self, process, stage, nbytes, arrival):
        target = self.home[stage]
        if target == process:
            arrival.succeed()
            return
        stops = (
            [self.links[process], self.hub, self.links[target]]
            if self.hub
            else [self.links[process], self.links[target]]
        )
        hops = [hop for start, end in pairwise(stops) for hop in self.route(start, end, nbytes)]
        self.env.process(self.travel(hops, arrival))

    def route(self, start, end, nbytes):
        framing = self.step_spec.framing or ("gloo" if self.hub is None else "nats")
        bits = nbytes_on_wire(nbytes, framing) * 8
        whole = 1 / pieces_of(nbytes) if start is self.hub else 0.0
        latency = start.spec.latency_s + (end.spec.latency_s if self.hub else 0.0)
        return [
            (start.up, bits / start.spec.up_bps, latency, start.spec.latency_per == "message", whole),
            (end.down, bits / end.spec.down_bps, 0.0, False, 0.0),
        ]

    def travel(self, hops, arrival, gone=None):
        began = self.env.now
        for link, seconds, latency, holds, whole in hops:
            came = self.env.now
            with link.request() as turn:
                yield turn
                start = max(began + (came - began) * whole, link.released)
                finish = max(came + seconds * whole, start + seconds)
                yield self.env.timeout(max(0.0, finish - self.env.now))
                if gone is not None and not gone.triggered:
                    gone.succeed()
                if holds:
                    yield self.env.timeout(latency)
                link.released = self.env.now
            if not holds:
                yield self.env.timeout(latency)
            began = start + latency
        arrival.succeed()
