"""Connections to a replica, which are all given up when the replica shows no sign of life.

An answer may take minutes, so that its silence tells nothing.  While a replica has requests it is
therefore asked for `/health`, which it answers at once as long as it lives, whatever it answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, TCPConnector

_CONNECT_S = 5.0


@dataclass(frozen=True)
class Patience:
    """How long a replica may be silent.

    Attributes:
        answer_s: without a word of an answer under way.
        every_s: between questions for a sign of life.
        sign_s: for the answer to one; a server that is busy with a long prompt takes seconds.
        most_missed: questions in a row without answer, until the replica is given up.
    """

    answer_s: float = 600.0
    every_s: float = 5.0
    sign_s: float = 10.0
    most_missed: int = 3


PATIENCE = Patience()
"""That of a router."""


class ReplicaLink:
    """Connections to a replica.

    Args:
        url: of the replica.
        patience: with the replica.
    """

    def __init__(self, url: str, patience: Patience) -> None:
        self.url, self._patience = url, patience
        self.is_silent = False
        """Whether it has been given up, and has shown no sign of life since."""
        self._under_way = 0
        # Those whose head has come, and whose body goes on.
        self._answers: set[ClientResponse] = set()
        self._session: ClientSession | None = None
        self._watch: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def ask(
        self, method: str, path: str, body: bytes, kind: str
    ) -> AsyncIterator[ClientResponse]:
        """Ask the replica.

        Args:
            method, path, body: of the request.
            kind: type of the body.
        Raises:
            ClientError, TimeoutError, OSError: the replica cannot be reached, or is given up.
        """
        if self._session is None:
            limits = ClientTimeout(
                total=None, connect=_CONNECT_S, sock_read=self._patience.answer_s
            )
            # Engines close connections that are idle; one that is used again may be closed by now.
            connector = TCPConnector(limit=0, force_close=True)
            self._session = ClientSession(timeout=limits, connector=connector)
        self._under_way += 1
        if self._watch is None:
            self._watch = asyncio.create_task(self._watch_over())
        try:
            headers = {"Content-Type": kind}
            async with self._session.request(
                method, self.url + path, data=body, headers=headers
            ) as answer:
                self._answers.add(answer)
                try:
                    yield answer
                finally:
                    self._answers.discard(answer)
        except (ClientError, OSError) as error:
            if self.is_silent:
                raise TimeoutError(self.silence) from error
            raise
        finally:
            self._under_way -= 1

    @property
    def silence(self) -> str:
        """Return why the replica was given up."""
        patience = self._patience
        return (
            f"it has answered {patience.most_missed} requests for /health in a row not at all, nor "
            f"within {patience.sign_s:g} s"
        )

    async def close(self) -> None:
        """Give all connections up."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        await self._give_up()

    async def _give_up(self) -> None:
        session, self._session = self._session, None
        # A body that is being read gets its error by its answer, a head that is awaited by the
        # session.
        for answer in list(self._answers):
            answer.close()
        if session is not None:
            await session.close()

    async def _watch_over(self) -> None:
        """Look for signs of life as long as a request is under way, or the replica is given up."""
        missed = 0
        while self._under_way or self.is_silent:
            await asyncio.sleep(self._patience.every_s)
            missed = 0 if await self._lives() else missed + 1
            was_silent, self.is_silent = self.is_silent, missed >= self._patience.most_missed
            if self.is_silent and not was_silent:
                # What waits for an answer gets an error, and may go to another replica.
                await self._give_up()
        self._watch = None

    async def _lives(self) -> bool:
        limit = ClientTimeout(total=self._patience.sign_s)
        try:
            async with ClientSession(timeout=limit) as session, session.get(f"{self.url}/health"):
                return True
        except (ClientError, TimeoutError, OSError):
            return False
