from __future__ import annotations

import pytest

from monarch_slurm.host.worker_address import WorkerAddress
from monarch_slurm.job import (
    deserialize_service_proc_ids,
    new_service_proc_id,
    ranked_service_proc_id_from_env,
    serialize_service_proc_ids,
    service_proc_addr,
    service_proc_addrs,
)
from monarch_slurm.job.service_ids import ServiceIdError


def test_ids_go_through_an_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [new_service_proc_id() for _ in range(3)]
    assert len(set(ids)) == 3
    text = serialize_service_proc_ids(ids)
    assert deserialize_service_proc_ids(text) == ids
    monkeypatch.setenv("MONARCH_SERVICE_PROC_IDS", text)
    monkeypatch.setenv("MONARCH_SERVICE_PROC_RANK", "1")
    monkeypatch.setenv("SLURM_NODEID", "2")
    assert ranked_service_proc_id_from_env() == ids[1]
    assert ranked_service_proc_id_from_env(rank_env="SLURM_NODEID") == ids[2]
    for rank, message in (("3", "has 3 ids"), ("x", "invalid literal"), ("-1", "has 3 ids")):
        monkeypatch.setenv("MONARCH_SERVICE_PROC_RANK", rank)
        with pytest.raises(ServiceIdError, match=message):
            ranked_service_proc_id_from_env()
    monkeypatch.delenv("MONARCH_SERVICE_PROC_RANK")
    with pytest.raises(ServiceIdError, match="MONARCH_SERVICE_PROC_RANK is not set"):
        ranked_service_proc_id_from_env()


def test_addresses_with_ids() -> None:
    one, other = new_service_proc_id(), new_service_proc_id()
    assert WorkerAddress.parse(service_proc_addr("tcp://n1:4444", one)).identity == str(one)
    assert service_proc_addrs(["tcp://a:1", "tcp://b:1"], [one, other])[1] == f"{other}@tcp://b:1"
    with pytest.raises(ValueError, match="2 ids for 1 addresses"):
        service_proc_addrs(["tcp://a:1"], [one, other])


@pytest.mark.parametrize("text", ["", "{}", "[1]", "null", '["no id"]'])
def test_texts_that_are_no_ids(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - of json, or of ids
        deserialize_service_proc_ids(text)
