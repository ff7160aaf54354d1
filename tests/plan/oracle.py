"""The same step as `plan/simulate.py`, told to simpy: processes that wait for each other, not a list of events."""

from itertools import pairwise

import simpy

from thinpipe.plan.actions import Kind
from thinpipe.plan.lines import nbytes_on_wire, pieces_of


class Line:
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
    def __init__(self, job):
        self.job, self.env = job, simpy.Environment()
        self.lines = [Line(self.env, spec) for spec in job.lines]
        self.hub = None if job.hub is None else Line(self.env, job.hub)
        count = len(job.actions)
        hosts = job.hosts or list(range(count))
        machines = {host: Host(self.env, (job.cores or {}).get(host, count)) for host in set(hosts)}
        self.host = [machines[host] for host in hosts]
        self.home = {action.stage: process for process, actions in enumerate(job.actions) for action in actions}
        self.mail, self.passes, self.ended = {}, {}, []
        self.votes, self.answers = [self.env.event() for _ in range(count)], [self.env.event() for _ in range(count)]
        self.all_voted = simpy.AllOf(self.env, self.votes)
        if job.exchange_nbytes and count > 1:
            self.env.process(self.sum())
        for process in range(count):
            self.env.process(self.run_process(process))
        self.env.run()

    def arrival(self, *name):
        return self.mail.setdefault(name, self.env.event())

    def run_process(self, process):
        last = len(self.job.works) - 1
        for stage, kind, microbatch in self.job.actions[process]:
            work = self.job.works[stage]
            input_s, weight_s = (work.input_s, work.weight_s) if stage else (0.0, work.input_s + work.weight_s)
            if kind is Kind.FORWARD and stage > 0:
                yield self.arrival("states", stage, microbatch)
            if kind in (Kind.BACKWARD, Kind.INPUT) and stage < last:
                yield self.arrival("gradients", stage, microbatch)
            start = self.env.now
            yield self.host[process].compute(
                {"F": work.forward_s, "B": input_s + weight_s, "I": input_s, "W": weight_s}[kind]
            )
            self.passes[process, stage, str(kind), microbatch] = start, self.env.now
            if kind is Kind.FORWARD and stage < last:
                self.post(process, stage + 1, self.job.forward_nbytes, self.arrival("states", stage + 1, microbatch))
            if kind in (Kind.BACKWARD, Kind.INPUT) and stage > 0:
                gradients = self.arrival("gradients", stage - 1, microbatch)
                self.post(process, stage - 1, self.job.backward_nbytes, gradients)
        if self.job.exchange_nbytes and len(self.job.actions) > 1:
            if self.hub is None and process == len(self.job.actions) - 1:
                self.votes[process].succeed()
            else:
                centre = self.lines[-1] if self.hub is None else self.hub
                self.env.process(
                    self.travel(self.way(self.lines[process], centre, self.job.exchange_nbytes), self.votes[process])
                )
            yield self.answers[process]
        if self.job.optimiser_s:
            yield self.host[process].compute(self.job.optimiser_s[process])
        self.ended.append(self.env.now)

    def sum(self):
        yield self.all_voted
        last = len(self.lines) - 1
        centre, others = (self.hub, last + 1) if self.hub is not None else (self.lines[-1], last)
        gone = []
        for process in range(others):
            gone.append(self.env.event())
            way = self.way(centre, self.lines[process], self.job.exchange_nbytes)
            self.env.process(self.travel(way, self.answers[process], gone[-1]))
        if self.hub is None:
            yield simpy.AllOf(self.env, gone)
            self.answers[last].succeed()

    def post(self, process, stage, nbytes, arrival):
        target = self.home[stage]
        if target == process:
            arrival.succeed()
            return
        stops = (
            [self.lines[process], self.hub, self.lines[target]]
            if self.hub
            else [self.lines[process], self.lines[target]]
        )
        hops = [hop for start, end in pairwise(stops) for hop in self.way(start, end, nbytes)]
        self.env.process(self.travel(hops, arrival))

    def way(self, start, end, nbytes):
        framing = self.job.framing or ("gloo" if self.hub is None else "nats")
        bits = nbytes_on_wire(nbytes, framing) * 8
        whole = 1 / pieces_of(nbytes) if start is self.hub else 0.0
        latency = start.spec.latency_s + (end.spec.latency_s if self.hub else 0.0)
        return [
            (start.up, bits / start.spec.up_bps, latency, start.spec.latency_per == "message", whole),
            (end.down, bits / end.spec.down_bps, 0.0, False, 0.0),
        ]

    def travel(self, hops, arrival, gone=None):
        began = self.env.now
        for line, seconds, latency, holds, whole in hops:
            came = self.env.now
            with line.request() as turn:
                yield turn
                start = max(began + (came - began) * whole, line.released)
                finish = max(came + seconds * whole, start + seconds)
                yield self.env.timeout(max(0.0, finish - self.env.now))
                if gone is not None and not gone.triggered:
                    gone.succeed()
                if holds:
                    yield self.env.timeout(latency)
                line.released = self.env.now
            if not holds:
                yield self.env.timeout(latency)
            began = start + latency
        arrival.succeed()
