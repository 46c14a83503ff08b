"""The one model that all engines of a deployment have loaded."""

from pdkv.errors import IncompatiblePeers


class DeploymentModel:
    """The identity that the first engine reports is the deployment's as long as its launcher lives.

    A restarted engine that reads other weights is refused, even if all others are gone: answers that have begun, and
    KV that is kept elsewhere, are of the first.
    """

    def __init__(self) -> None:
        self.identity = ""  # empty: no engine has reported any
        self._first = ""

    def check(self, name: str, identity: str) -> None:
        """An engine, or a rank of one, has loaded this.

        Raises:
            IncompatiblePeers: others have loaded something else; the message has both values.
        """
        if not self.identity:
            self.identity, self._first = identity, name
        if identity != self.identity:
            raise IncompatiblePeers(
                f"{name} has model {identity}, but the deployment started with model {self.identity} (of {self._first})"
                ": weight files or config.json differ. Restore them, or restart the deployment"
            )
