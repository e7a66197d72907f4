"""`GET /nxbucket/buckets`: what is bound, and how much each program was used."""

from argparse import Namespace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.datastructures import State
from vllm import envs
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from nxbucket.compile.lockfile import LockedProgram
from nxbucket.compile.manifest import blob_of
from nxbucket.serve.engine_args import HTTP_PLUGIN
from nxbucket.serve.served import Served


class BucketsEndpoint:
    """Guarded by the server's own API key: vLLM's middleware covers only its own prefixes."""

    name = HTTP_PLUGIN
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        @app.get("/nxbucket/buckets")
        async def buckets(request: Request) -> JSONResponse:
            state: State = request.app.state
            guard: AuthenticationMiddleware | None = state.nxbucket_guard
            if guard is not None and not guard.verify_token(request.headers):
                return JSONResponse({"error": "Unauthorized"}, status_code=401)
            (executions,) = await state.nxbucket_engine.collective_rpc("nxbucket_executions")
            return JSONResponse(describe(state.nxbucket_served, executions))

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        keys = [key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]
        state.nxbucket_guard = AuthenticationMiddleware(_no_app, keys) if keys else None
        state.nxbucket_engine = engine_client
        state.nxbucket_served = Served.from_vllm_config(engine_client.vllm_config)


def describe(served: Served, executions: dict[str, int]) -> dict[str, Any]:
    return {
        "target": served.target,
        "emulated": served.emulated,
        "lock": served.lock_file.name,
        "spec_digest": served.lock.spec_digest,
        "num_kv_blocks": served.locked.num_kv_blocks,
        "programs": [
            {
                "name": program.name,
                "phase": program.phase,
                "size": program.size,
                "context_len": program.context_len,
                "digest": _digest(served, program),
                "executions": executions[program.name],
            }
            for program in served.locked.programs
        ],
    }


def _digest(served: Served, program: LockedProgram) -> str | None:
    """Of what runs: a program, or the graph that is emulated."""
    blob = blob_of(program.blobs, served.runs)
    return None if blob is None else blob.digest


def plugin() -> BucketsEndpoint:
    """The entry point of vLLM's `vllm.endpoint_plugins`."""
    return BucketsEndpoint()


async def _no_app(*_: Any) -> None:
    """The middleware is used for its token check alone."""
