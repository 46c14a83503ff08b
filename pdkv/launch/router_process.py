"""The router as a child process of the launcher."""

import logging
import sys

from pdkv.launch.acks import Acknowledger, StartGivenUp
from pdkv.launch.lifeline import sweep_if_orphaned, watch_lifeline
from pdkv.launch.linux import return_large_allocations, set_process_name
from pdkv.launch.logs import configure_logging
from pdkv.launch.specs import RouterSpec, decode_router_spec, take_spec
from pdkv.router.process import EngineEndpoint, run_router
from pdkv.router.state import ORDERS

_LIFELINE_GRACE_S = 3.0  # above what connections have to end after a stop

logger = logging.getLogger(__name__)


def main(spec: RouterSpec, listen_fd: int, ack_fd: int, lifeline_fd: int) -> int:
    """Run the router in this process; returns its exit status. It is ready when every engine has answered it."""
    configure_logging("router", spec.log_level)
    set_process_name("pd router")
    return_large_allocations()
    watch_lifeline(lifeline_fd, lambda: None, grace_s=_LIFELINE_GRACE_S, run_dir=spec.run_dir)  # the loop sees it, too
    ack = Acknowledger(ack_fd)
    try:
        return run_router(
            router_id=spec.router_id,
            listen_fd=listen_fd,
            engines=[
                EngineEndpoint(engine.name, engine.role, engine.endpoint, engine.refusal) for engine in spec.engines
            ],
            model=spec.model,
            served_model_name=spec.served_model_name,
            policy=spec.policy,
            orders=spec.orders or ORDERS,
            await_all=spec.await_all,
            limits=spec.limits,
            identity=spec.identity,
            lifeline_fd=lifeline_fd,
            on_ready=ack.ready,
        )
    except StartGivenUp:
        return 1
    except Exception as error:
        if ack.answered:
            logger.exception("the router stops after an error")
        else:
            ack.failed(error)
        return 1
    finally:
        sweep_if_orphaned(lifeline_fd, spec.run_dir)


if __name__ == "__main__":
    sys.exit(main(decode_router_spec(take_spec()), *map(int, sys.argv[1:4])))
