"""Cases about a connector's process: its step thread, its sockets, and leaks."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import starmap

from pdkv.connector_kit.check.cases import case
from pdkv.connector_kit.rig.engine import Engine
from pdkv.connector_kit.rig.handover import Handover, legal_orders, new_text
from pdkv.connector_kit.rig.host import Host
from pdkv.connector_kit.rig.protocol import Usage
from pdkv.connector_kit.rig.rank import HostedRank
from pdkv.connector_kit.rig.shm_files import left_behind, shm_files
from pdkv.connector_kit.rig.sockets import listeners, send_garbage
from pdkv.connector_kit.rig.watch import STRICT
from pdkv.connector_kit.rig.world import AMPLE_S, TRANSFER_POLL_S, NotApplicable, Setting, Shape, World, require

MAX_BLOCKED_S = 0.25
"""Seconds: a call on the step thread that sleeps longer is waiting for something; shorter ones wait for the interpreter
lock.
"""

MAX_COPY_SHARE = 0.4
"""Share of a plain copy's CPU time that one call may take: more is a copy on the step thread."""

COPY_SHAPE = Shape(num_blocks=288, num_layers=4, head_size=64)
COPY_BLOCKS = 256
COPY_ROUNDS = 3

NUM_LEAK_ROUNDS = 24
MAX_GROWTH_BYTES = 16 << 20
GROWTH_ATTEMPTS = 3
SETTLE_S = 5.0
LEAK_SHAPE = Shape(num_blocks=64, num_layers=8, head_size=64)
LEAK_BLOCKS = 16  # 4 MiB, of which a leak would keep at least one in four


@case("step_thread")
def step_thread(setting: Setting) -> None:
    """No call of the step thread enters the transport or waits for it: peers stopped, big loads, and instrumented."""
    with World(setting, deadline_s=AMPLE_S) as world:
        for order in legal_orders(world):
            Handover(world, 100, order=order, chunk=48).run()
        _check_calls(world)
        if not setting.one_process:
            _with_stopped_peer(world, "p")
            _with_stopped_peer(world, "d")
    if not setting.one_process:
        with World(setting, COPY_SHAPE, COPY_SHAPE) as world:
            _big_loads(world)


def _with_stopped_peer(world: World, name: str) -> None:
    """Everything that one side can do while the other is stopped, in all orders, until the deadlines pass."""
    begun = []
    for order in legal_orders(world):
        transfer = Handover(world, 100, order=order, chunk=48)
        num_late = 3 if not transfer.is_push else 1 if order == "late_ticket" else 2
        steps = transfer.steps
        transfer.take(*steps[:-num_late])
        begun.append((transfer, steps[-num_late:]))
    world.stop(name)
    for transfer, late in begun:
        if name == "p" and not transfer.is_push:
            _load_what_is_known(world, transfer)
        elif name == "d" and transfer.is_push:
            transfer.take(*late)
    world.run_for(AMPLE_S + TRANSFER_POLL_S)
    _check_calls(world)
    world.resume(name)
    for transfer, _ in begun:
        transfer.abort()
    world.check_rest()


def _load_what_is_known(world: World, transfer: Handover) -> None:
    """Ask once: the side that could tell more is stopped."""
    matched = world.consumer.external.match(transfer.receiver, 0)
    if matched.num_tokens:
        transfer.num_external = matched.num_tokens
        if not transfer.receiver.block_ids:
            transfer.allocate()
        transfer.start()


def _check_calls(world: World) -> None:
    """Check that no strict call was blocked or entered forbidden code."""
    for engine in world.live_engines():
        for calls in engine.ask_all(HostedRank.take_calls):
            for record in calls:
                if record.name not in STRICT:
                    continue
                require(not record.entered, f"{record.name} calls {', '.join(record.entered)} on the step thread")
                blocked = f"{record.name} was blocked for {record.blocked_s:.2f} s on the step thread"
                require(record.blocked_s < MAX_BLOCKED_S, blocked)


def _big_loads(world: World) -> None:
    """The step thread's part of a load of 32 MiB costs far less than copying it."""
    world.consumer.ask_all(HostedRank.instrument, False)
    shares = []
    for _ in range(COPY_ROUNDS):
        transfer = Handover(world, 16 * COPY_BLOCKS, check=False)
        transfer.take()
        transfer.wait()
        target = list(transfer.receiver.block_ids)
        cost = world.consumer.ask(HostedRank.copy_cost, target)
        (calls,) = world.consumer.ask_all(HostedRank.take_calls)
        name, seconds = max(((r.name, r.cpu_s) for r in calls if r.name in STRICT), key=lambda item: item[1])
        shares.append((seconds / cost, name))
        transfer.end()
        world.check_rest()  # a save beside a pull may hold the blocks for longer
    share, name = min(shares)
    require(share < MAX_COPY_SHARE, f"{name} takes {share:.0%} of the CPU time of copying all of the load: it copies")


@case("garbage", covers="F16 F17")
def garbage(setting: Setting) -> None:
    """Garbage on every listening socket, before the first contact and later, ends nothing and harms no transfer."""
    with World(setting) as world:
        num_sockets = _send_everywhere(world)
        for order in legal_orders(world):
            Handover(world, 52, order=order).run()
        num_sockets += _send_everywhere(world)
        for order in legal_orders(world):
            Handover(world, 52, order=order).run()
        if not num_sockets:
            raise NotApplicable("no process listens on a socket")


def _send_everywhere(world: World) -> int:
    hosts = {host.pid for engine in world.engines.values() for host in engine.hosts}
    found = [listener for pid in hosts for listener in listeners(pid)]
    kept = [connection for listener in found for connection in send_garbage(listener)]
    world.run_for(0.2)
    for connection in kept:
        connection.close()
    return len(found)


@case("leaks", covers="F24")
def leaks(setting: Setting) -> None:
    """Aborts and restarts of peers cost no memory, descriptors or threads; shutdown releases everything."""
    for _ in range(2):  # a third party's connector may leave names behind, but not each time
        if not (left := _shared_memory_left_by(setting)):
            return
    require(False, f"shared memory is left behind: {', '.join(sorted(left))}")


def _shared_memory_left_by(setting: Setting) -> set[str]:
    """Names left behind by two worlds, the processes of which must not grow."""
    before = shm_files()
    with World(setting, LEAK_SHAPE, LEAK_SHAPE) as world:
        for order in legal_orders(world)[:1]:
            _aborts_leave_nothing(world, order)
        Handover(world, 100).run()
    left = left_behind(before, SETTLE_S)
    with World(setting) as world:
        for name in list(world.engines):
            _shutdown_leaves_nothing(world, name)
        Handover(world, 100).run()
    return left | left_behind(before, SETTLE_S)


def _aborts_leave_nothing(world: World, order: str) -> None:
    """Loads of one text (a store keeps it once) that are given up in different stages; growth after a while counts."""
    text = new_text(16 * LEAK_BLOCKS + 1)

    def abort_often(num_rounds: int) -> None:
        for number in range(num_rounds):
            size = 16 * LEAK_BLOCKS
            transfer = Handover(world, size, order=order, text=text, chunk=size // 2, check=False)
            steps = transfer.steps
            transfer.take(*steps[: len(steps) - number % 3])
            transfer.abort()
            world.check_rest()
        Handover(world, 52, order=order).run()  # connections closed by an abort are open again

    abort_often(NUM_LEAK_ROUNDS // 2)
    _require_no_growth(world, "aborted transfers", lambda: abort_often(NUM_LEAK_ROUNDS))


def _shutdown_leaves_nothing(world: World, name: str) -> None:
    """Shut an engine's connector down and build the next one in the same process; the growth of later rounds counts."""

    def rebuild() -> None:
        Handover(world, 52).run()
        world.engines[name].close()
        world.revive(name, world.engines.pop(name).hosts)

    for _ in range(2):
        rebuild()
    Handover(world, 52).run()  # background connections have been opened before they are counted

    def thrice() -> None:
        for _ in range(3):
            rebuild()

    _require_no_growth(world, f"shutting {name} down", thrice)


def _require_no_growth(world: World, what: str, action: Callable[[], None]) -> None:
    """Check for growth. Resources released on other threads have some time. An allocator may keep free memory, and a
    library's pool may have one more thread for a while, but not more each time.
    """
    growth = []
    for _ in range(GROWTH_ATTEMPTS):
        before = [_usage(engine) for engine in world.engines.values()]
        action()
        found = _lasting(world, before, _more_descriptors)
        require(not found, f"{what}: {found}")
        found = _lasting(world, before, _more_threads) or _lasting(world, before, _more_memory)
        if not found:
            return
        growth.append(found)
    require(False, f"{what}, each time: {', then '.join(growth)}")


def _lasting(world: World, before: Sequence[Sequence[Usage]], more: Callable[[Usage, Usage], str]) -> str:
    """The growth that `more` still finds after a while, on all ranks."""

    def found() -> str:
        pairs = zip(world.engines.values(), before, strict=True)
        ranks = (rank for engine, old in pairs for rank in zip(old, _usage(engine), strict=True))
        return "; ".join(filter(None, starmap(more, ranks)))

    return "" if world.runs_until(lambda: not found(), SETTLE_S) else found()


def _usage(engine: Engine) -> list[Usage]:
    return [host.ask("", Host.usage, engine.timeout_s) for host in engine.hosts]


def _more_descriptors(before: Usage, after: Usage) -> str:
    """The additional descriptors, in words."""
    if len(after.descriptors) <= len(before.descriptors):
        return ""
    more = Counter(map(_kind, after.descriptors)) - Counter(map(_kind, before.descriptors))
    return f"additional descriptors: {dict(more)}"


def _more_threads(before: Usage, after: Usage) -> str:
    """The additional threads, in words."""
    if len(after.threads) <= len(before.threads):
        return ""
    return f"additional threads: {dict(Counter(after.threads) - Counter(before.threads))}"


def _more_memory(before: Usage, after: Usage) -> str:
    """Growth of memory beyond the usual variation, in words."""
    growth = after.resident_bytes - before.resident_bytes
    return f"{growth >> 20} MiB of additional memory" if growth > MAX_GROWTH_BYTES else ""


def _kind(descriptor: str) -> str:
    """A descriptor without its number."""
    return descriptor.partition(":[")[0]
