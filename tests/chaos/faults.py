"""Faults of processes, connections, clocks and certificates."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar, Final

from tests.chaos.proxy import HARMLESS, Toxin
from tests.chaos.scene import STREAMS
from tests.system.daemons import environment

if TYPE_CHECKING:
    from pathlib import Path

    from tests.chaos.proxy import Proxy
    from tests.chaos.scene import Scene

DAY: Final = 86_400
TOXINS: Final = {
    "late": Toxin(delay=0.3),
    "slow": Toxin(delay=0.02, piece=200),
    "sliced": Toxin(piece=1),
    "silent": Toxin(silent=True),
}


class Fault:
    """Something that goes wrong.

    Attributes:
        needs: what the machine must have (``needs.py``).
        weight: how often it is drawn, relative to others.

    """

    needs: ClassVar[tuple[str, ...]] = ()
    weight: ClassVar[int] = 1

    @property
    def name(self) -> str:
        """The name in the totals."""
        return type(self).__name__

    def fits(self, scene: Scene) -> bool:
        """Return whether the scene has what goes wrong."""
        return True

    def inject(self, scene: Scene) -> None:
        """Let it go wrong."""
        raise NotImplementedError

    def heal(self, scene: Scene) -> None:
        """Remove the cause, if it is not gone by itself."""


def any_daemon(scene: Scene) -> str:
    """Return the name of a daemon: writers and the relay more often than others."""
    return scene.chance.choice(["master", "writer1", "relay", *scene.daemons])


def any_proxy(scene: Scene) -> Proxy:
    """Return a proxy."""
    return scene.chance.choice([each for pair in scene.through.values() for each in pair])


class Kill(Fault):
    """SIGKILL of a daemon, which is started again soon."""

    weight = 12

    def inject(self, scene: Scene) -> None:
        name = any_daemon(scene)
        scene.held.add(name)
        scene.kill(name)
        scene.act(scene.chance.choice((0, 0, scene.chance.uniform(0, 1.5))))
        scene.held.discard(name)
        scene.start(name)


class KillSeveral(Fault):
    """SIGKILL of several daemons at one moment."""

    weight = 3

    def inject(self, scene: Scene) -> None:
        names = scene.chance.sample(list(scene.daemons), scene.chance.randrange(2, 5))
        for each in names:
            scene.kill(each)
        for each in names:
            scene.start(each)


class KillAtStart(Fault):
    """SIGKILL of a daemon while it starts, twice."""

    weight = 2

    def inject(self, scene: Scene) -> None:
        name = any_daemon(scene)
        for _ in range(3):
            scene.kill(name)
            scene.start(name)
            scene.act(scene.chance.uniform(0.0, 0.8))


class KillAppender(Fault):
    """SIGKILL of a program that appends; the next one asks again for what has no answer."""

    weight = 4

    def inject(self, scene: Scene) -> None:
        scene.kill_appender(scene.chance.choice(list(STREAMS)))


class Terminate(Fault):
    """SIGTERM of a daemon: it stops in order."""

    def inject(self, scene: Scene) -> None:
        name = any_daemon(scene)
        with suppress(ProcessLookupError):
            os.kill(scene.daemons[name].pid, signal.SIGTERM)
        scene.act(0.5)


class Stop(Fault):
    """SIGSTOP of a daemon, and SIGCONT."""

    weight = 2

    def inject(self, scene: Scene) -> None:
        self._name = any_daemon(scene)
        self._pid = scene.daemons[self._name].pid
        self._signal(scene, signal.SIGSTOP)

    def heal(self, scene: Scene) -> None:
        self._signal(scene, signal.SIGCONT)

    def _signal(self, scene: Scene, number: signal.Signals) -> None:
        daemon = scene.daemons[self._name]
        if not daemon.ended and daemon.pid == self._pid:  # else it was killed, and started again
            os.kill(self._pid, number)


class Cut(Fault):
    """All connections through a proxy are reset."""

    weight = 3

    def inject(self, scene: Scene) -> None:
        any_proxy(scene).cut()


class Toxic(Fault):
    """A proxy is late, slow, passes single bytes, or nothing."""

    weight = 4

    def inject(self, scene: Scene) -> None:
        self._kind = scene.chance.choice(list(TOXINS))
        self._proxy = any_proxy(scene)
        self._proxy.toxin = TOXINS[self._kind]

    def heal(self, scene: Scene) -> None:
        self._proxy.toxin = HARMLESS
        if self._kind == "silent" and scene.chance.random() < 0.5:
            self._proxy.cut()


class WrongBytes(Fault):
    """A proxy changes single bits. Only TLS can notice that."""

    weight = 2

    def fits(self, scene: Scene) -> bool:
        return scene.plan.tls

    def inject(self, scene: Scene) -> None:
        self._proxy = any_proxy(scene)
        self._proxy.toxin = Toxin(wrong=0.2)

    def heal(self, scene: Scene) -> None:
        self._proxy.toxin = HARMLESS


class NewCertificate(Fault):
    """The certificate of all servers is renewed, in one of three cases after a file with nonsense; SIGHUP."""

    weight = 2

    def fits(self, scene: Scene) -> bool:
        return scene.plan.tls

    def inject(self, scene: Scene) -> None:
        assert scene.identity is not None
        if scene.chance.random() < 0.3:
            scene.identity.key.write_text("nonsense")
            self._hang_up(scene)
            scene.act(0.5)
        renewed = scene.issue("renewed")
        for source, target in (
            (renewed.key, scene.identity.key),
            (renewed.certificate, scene.identity.certificate),
        ):
            target.write_bytes(source.read_bytes())
        self._hang_up(scene)
        scene.act(0.5)
        for pair in scene.through.values():
            for each in pair:
                each.cut()

    def _hang_up(self, scene: Scene) -> None:
        for name in scene.ports:
            daemon = scene.daemons[name]
            if not daemon.ended and "is served at" in daemon.log:  # before that, SIGHUP ends it
                with suppress(ProcessLookupError):
                    os.kill(daemon.pid, signal.SIGHUP)


class ClockStep(Fault):
    """The wall clock of a daemon jumps, up to three days back or forward."""

    weight = 3

    def fits(self, scene: Scene) -> bool:
        return scene.plan.clocks

    def inject(self, scene: Scene) -> None:
        names = [name for name, each in scene.daemons.items() if each.before]
        scene.step_clock(scene.chance.choice(names), scene.chance.randrange(-3 * DAY, 3 * DAY))


class KillReplay(Fault):
    """SIGKILL of a replay; what it leaves is whole, or does not count."""

    needs = ("replay",)

    def inject(self, scene: Scene) -> None:
        stream = scene.chance.choice(list(STREAMS))
        command = replay_command(scene, stream, "none")
        with (scene.folder / "replay.log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment())
        scene.act(scene.chance.uniform(0.5, 4))
        if process.poll() is None:
            scene.kills["replay"] += 1
            process.kill()
        process.wait()


def replay_command(scene: Scene, stream: str, master: str) -> list[str]:
    """Return the command that writes the segments of a stream, on the Spark ``master`` or without Spark."""
    command = [sys.executable, "-m", "replication.replay", f"--database={scene.homes[stream].url}"]
    return [*command, f"--out={segments_folder(scene, stream)}", f"--stream={stream}", f"--master={master}"]


def segments_folder(scene: Scene, stream: str) -> Path:
    """Return the folder of segments; after a loss a new one begins."""
    losses = sum(each.stream == stream for each in scene.losses)
    return scene.folder / f"segments-{STREAMS[stream]}{f'-{losses}' if losses else ''}"


FAULTS: Final[tuple[type[Fault], ...]] = (
    Kill,
    KillSeveral,
    KillAtStart,
    KillAppender,
    Terminate,
    Stop,
    Cut,
    Toxic,
    WrongBytes,
    NewCertificate,
    ClockStep,
    KillReplay,
)
