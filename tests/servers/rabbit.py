"""A private RabbitMQ with its own port mapper, so that it cannot be mistaken for another node."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

from .locate import rabbit_programs
from .process import PrivateServer, ServerFailed, ServerFolder, free_port

_PROTOCOL_HEADER = b"AMQP\x00\x00\x09\x01"


class RabbitServer(PrivateServer):
    """One node without plugins. `stop(immediate=True)` is a power cut."""

    def __init__(self) -> None:
        self._programs = rabbit_programs()
        super().__init__(ServerFolder("rabbit", ("rabbitmq", "nobody")))
        self.port, self._distribution_port, self._mapper_port = (
            free_port(),
            free_port(),
            free_port(),
        )
        self.url = f"amqp://guest:guest@127.0.0.1:{self.port}/"
        self.folder.write("plugins", "[].\n")
        self.folder.write("env.conf", "")
        self.folder.write(
            "rabbit.conf",
            f"listeners.tcp.1 = 127.0.0.1:{self.port}\n"
            "total_memory_available_override_value = 4GB\n",
        )
        for folder in ("data", "logs"):
            (self.folder.path / folder).mkdir()
            self.folder.chown(self.folder.path / folder)
        self._mapper: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        return [str(self._programs / "rabbitmq-server")]

    def environment(self) -> dict[str, str]:
        home = self.folder.path
        return {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(home),  # the cookie is stored here
            "LC_ALL": "C.UTF-8",
            "ERL_EPMD_PORT": str(self._mapper_port),
            # no shell between this process and the node, so that signals reach it
            "RABBITMQ_ALLOW_INPUT": "1",
            "RABBITMQ_SERVER_START_ARGS": "-noinput",
            "RABBITMQ_NODENAME": f"meshpoint-{self.port}@localhost",
            "RABBITMQ_DIST_PORT": str(self._distribution_port),
            "RABBITMQ_CONF_ENV_FILE": str(home / "env.conf"),
            "RABBITMQ_CONFIG_FILE": str(home / "rabbit.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(home / "plugins"),
            "RABBITMQ_MNESIA_BASE": str(home / "data"),
            "RABBITMQ_LOG_BASE": str(home / "logs"),
            "RABBITMQ_LOGS": "-",
        }

    def launch(self) -> None:
        if self._mapper is None:
            mapper = [
                shutil.which("epmd") or "epmd",
                "-address",
                "127.0.0.1",
                "-port",
                str(self._mapper_port),
            ]
            self._mapper = self.folder.spawn(mapper, self.environment(), signal.SIGKILL)
        super().launch()

    def is_ready(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=2) as client:
                client.sendall(_PROTOCOL_HEADER)
                return self.running and client.recv(1) == b"\x01"
        except OSError:
            return False

    def close(self) -> None:
        super().close()
        if self._mapper is not None:
            self._mapper.kill()
            self._mapper.wait()

    async def messages(self) -> dict[str, int]:
        """Number of messages per queue, unacked ones included.

        Raises:
            ServerFailed: `rabbitmqctl` failed.
        """
        output_file = self.folder.write("queues", "")
        await self.control(
            "list_queues", "--no-table-headers", "name", "messages", output=output_file
        )
        rows = (
            line.rsplit("\t", 1) for line in output_file.read_text().splitlines() if "\t" in line
        )
        return {name: int(count) for name, count in rows if count.isdigit()}

    def log(self) -> list[str]:
        """The lines that the node has logged so far."""
        return (self.folder.path / "log").read_text(errors="replace").splitlines()

    async def add_user(
        self, name: str, password: str, configure: str = ".*", write: str = ".*", read: str = ".*"
    ) -> None:
        """Add a login with these permissions."""
        login = f"{_binary(name)}, {_binary(password)}"
        rights = ", ".join(map(_binary, (name, "/", configure, write, read)))
        await self.evaluate(
            f'ok = rabbit_auth_backend_internal:add_user({login}, <<"tests">>), '
            f'ok = rabbit_auth_backend_internal:set_permissions({rights}, <<"tests">>).'
        )

    async def delete_user(self, name: str) -> None:
        """Delete a login."""
        await self.evaluate(
            f'ok = rabbit_auth_backend_internal:delete_user({_binary(name)}, <<"tests">>).'
        )

    async def limit_messages(self, max_bytes: int = 134_217_728) -> None:
        """Limit the size of a message. The default is the limit of a new node."""
        await self.evaluate(f"ok = application:set_env(rabbit, max_message_size, {max_bytes}).")

    async def evaluate(self, expressions: str) -> None:
        """Evaluate Erlang on the node, without the virtual machine that `rabbitmqctl` starts.

        Raises:
            ServerFailed: the node reports an error.
        """
        call = shutil.which("erl_call")
        if call is None:
            await self.control("eval", expressions)
            return
        source = self.folder.write("expressions", f"{expressions}\n")
        result = self.folder.write("result", "")
        node = self.environment()["RABBITMQ_NODENAME"]
        await self._run([call, "-sname", node, "-e"], output=result, source=source)
        if not (answer := result.read_text(errors="replace")).startswith("{ok, "):
            raise ServerFailed(f"{expressions} failed: {answer}")

    async def control(self, *arguments: str, output: Path | None = None) -> None:
        """Run `rabbitmqctl` on this node. Output goes to the log, or to the file `output`.

        Raises:
            ServerFailed: its exit code is not 0.
        """
        await self._run(
            [str(self._programs / "rabbitmqctl"), "--quiet", *arguments], output=output
        )

    async def _run(
        self, command: list[str], *, output: Path | None, source: Path = Path(os.devnull)
    ) -> None:
        process = self.folder.spawn(command, self.environment(), signal.SIGKILL, output, source)
        try:
            code = await asyncio.to_thread(process.wait)
        finally:
            process.kill()  # lets the thread end if the wait was cancelled
        if code != 0:
            raise ServerFailed(f"{' '.join(command)} failed:\n{self.folder.log_end()}")


def _binary(text: str) -> str:
    """An Erlang binary with `text`."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'<<"{escaped}">>'
