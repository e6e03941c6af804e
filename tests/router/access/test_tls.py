from __future__ import annotations

import contextlib
import os
import re
import ssl
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from common.config import RouterConfig
from common.errors import ConfigError
from router.access import tls
from router.access.access_control import AccessControl
from router.access.files import FileWatch
from router.access.tls import DAY, Certificate, load_context
from router.observe import RouterMetrics

CA = trustme.CA()


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return write(tmp_path, "good")


def write(folder: Path, name: str, not_after: datetime | None = None) -> tuple[Path, Path]:
    issued = CA.issue_cert("localhost", "127.0.0.1", not_after=not_after)
    cert, key = folder / f"{name}.crt", folder / f"{name}.key"
    cert.write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
    key.write_bytes(issued.private_key_pem.bytes())
    return cert, key


def refusal(cert: Path, key: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        load_context(str(cert), str(key))
    return str(refused.value)


def test_a_good_pair_is_taken(pair: tuple[Path, Path]) -> None:
    context = load_context(*map(str, pair))
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2


def test_one_of_two_is_refused() -> None:
    with pytest.raises(ConfigError, match="tls_key"):
        RouterConfig(tls_cert="a.crt")
    with pytest.raises(ConfigError, match="tls_cert"):
        RouterConfig(tls_key="a.key")


def test_a_file_that_is_not_there_is_named(pair: tuple[Path, Path], tmp_path: Path) -> None:
    assert f"tls_cert='{tmp_path / 'no'}'" in refusal(tmp_path / "no", pair[1])
    assert f"tls_key='{tmp_path / 'no'}'" in refusal(pair[0], tmp_path / "no")


def test_files_that_hold_something_else_are_named(pair: tuple[Path, Path], tmp_path: Path) -> None:
    assert "tls_cert=" in refusal(pair[1], pair[1])
    assert "tls_key=" in refusal(pair[0], pair[0])
    torn = tmp_path / "torn.crt"
    torn.write_bytes(pair[0].read_bytes()[:200])
    assert "tls_cert=" in refusal(torn, pair[1])


def test_the_key_of_another_certificate_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    assert "tls_key=" in refusal(pair[0], write(tmp_path, "other")[1])


def test_a_passphrase_is_not_asked_for(pair: tuple[Path, Path]) -> None:
    key = serialization.load_pem_private_key(pair[1].read_bytes(), None)
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    pair[1].write_bytes(key.private_bytes(pem, pkcs8, serialization.BestAvailableEncryption(b"hush")))
    assert "passphrase" in refusal(*pair)


async def test_a_bad_renewal_leaves_what_was(pair: tuple[Path, Path], tmp_path: Path) -> None:
    certificate = Certificate(*map(str, pair))
    good = pair[1].read_bytes()
    pair[1].write_bytes(write(tmp_path, "other")[1].read_bytes())
    with pytest.raises(ConfigError):
        await certificate.reload()
    pair[1].write_bytes(good)
    await certificate.reload()


async def test_a_renewed_certificate_is_shown(pair: tuple[Path, Path], tmp_path: Path) -> None:
    certificate = Certificate(*map(str, pair))
    assert shown(certificate) == shown(certificate, host=None) == pair[0].read_text()
    for old, new in zip(pair, write(tmp_path, "new"), strict=True):
        new.replace(old)
    assert shown(certificate) != pair[0].read_text()
    await certificate.reload()
    assert shown(certificate) == shown(certificate, host=None) == pair[0].read_text()


async def test_the_expiry_is_logged_once_a_day_until_the_certificate_is_renewed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    day_s = DAY.total_seconds()
    now, end = datetime(2030, 1, 1, tzinfo=UTC), datetime(2030, 1, 21, 12, tzinfo=UTC)
    clock = SimpleNamespace(now=now.timestamp())
    pair = write(tmp_path, "short", not_after=end)
    certificate = Certificate(*map(str, pair), lambda: clock.now)
    assert certificate.left_s == 20.5 * day_s and not caplog.records
    for _ in range(3):
        clock.now += 4 * day_s
        certificate.log_expiry()
        certificate.log_expiry()
    clock.now += 9 * day_s
    certificate.log_expiry()
    assert [record.getMessage() for record in caplog.records] == [
        f"TLS certificate {pair[0]} expires in 12.5 days, at 2030-01-21T12:00+00:00: renew the file",
        f"TLS certificate {pair[0]} expires in 8.5 days, at 2030-01-21T12:00+00:00: renew the file",
        f"TLS certificate {pair[0]} expired 0.5 days ago, at 2030-01-21T12:00+00:00: renew the file",
    ]
    for old, new in zip(pair, write(tmp_path, "new", not_after=datetime(2031, 1, 1, tzinfo=UTC)), strict=True):
        new.replace(old)
    await certificate.reload()
    assert certificate.left_s > 300 * day_s and len(caplog.records) == 3


def test_the_time_left_is_a_metric(tmp_path: Path) -> None:
    cert, key = map(str, write(tmp_path, "old", not_after=datetime(2020, 1, 1, tzinfo=UTC)))
    metrics = RouterMetrics("m", None)
    access = AccessControl(RouterConfig(tls_cert=cert, tls_key=key), metrics)
    (left_s,) = re.findall(r"^diptych_tls_certificate_expiry_seconds\{.*\} (\S+)$", metrics.snapshot()().decode(), re.M)
    assert access.certificate is not None and access.certificate.left_s < 0
    assert float(left_s) == pytest.approx(access.certificate.left_s, abs=60)


async def test_files_that_are_replaced_while_they_are_read_spoil_nothing(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has one of the two pairs, never half of each, and raises no error but ConfigError."""
    certificate, cert = Certificate(*map(str, pair)), pair[0].read_text()
    other = write(tmp_path, "other")[1].read_bytes()

    def replaced_behind(*paths: str) -> ssl.SSLContext:
        context = load_context(*paths)
        pair[1].write_bytes(other)
        return context

    monkeypatch.setattr(tls, "load_context", replaced_behind)
    await certificate.reload()
    assert shown(certificate) == cert


def shown(certificate: Certificate, host: str | None = "localhost") -> str:
    """The certificate that a client gets, in PEM."""
    context = ssl.create_default_context()
    CA.configure_trust(context)
    context.check_hostname = bool(host)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(to_client, to_server, server_hostname=host)
    server = certificate.context.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server, client, server):
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
    der = client.getpeercert(binary_form=True)
    assert der is not None
    return ssl.DER_cert_to_PEM_cert(der)


def test_a_change_counts_once_two_looks_agree(tmp_path: Path) -> None:
    file, link = tmp_path / "a", tmp_path / "link"
    file.write_text("1")
    link.symlink_to(file)
    watch = FileWatch([str(file), str(link)])
    assert [watch.look(), watch.look()] == [False, False]
    file.write_text("2")
    assert [watch.look(), watch.look(), watch.look()] == [False, True, False]
    file.write_text("half")
    assert not watch.look()
    file.write_text("whole")
    assert [watch.look(), watch.look()] == [False, True]


def test_a_swapped_symlink_and_a_lost_file_are_changes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    link, fresh = tmp_path / "link", tmp_path / "fresh"
    link.symlink_to(tmp_path / "a")
    watch = FileWatch([str(link)])
    fresh.symlink_to(tmp_path / "b")
    fresh.rename(link)
    assert [watch.look(), watch.look()] == [False, True]
    link.unlink()
    assert [watch.look(), watch.look(), watch.look()] == [False, True, False]


def test_a_file_that_cannot_be_read_now_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_text("1")
    watch = FileWatch([str(file)])
    file.unlink()
    os.mkfifo(file)
    with ThreadPoolExecutor(1) as threads:
        looks = [threads.submit(watch.look) for _ in range(3)]
        try:
            assert [look.result(timeout=60) for look in looks] == [False] * 3
        finally:  # let a look that waits for a writer end
            with contextlib.suppress(OSError):
                os.close(os.open(file, os.O_WRONLY | os.O_NONBLOCK))
    file.unlink()
    file.write_text("2")
    assert [watch.look(), watch.look()] == [False, True]
