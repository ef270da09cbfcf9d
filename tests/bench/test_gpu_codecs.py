"""The benchmark of codecs on a GPU where there is none, on the kernels' CPU twin."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from bench import gpu_codecs
from bench.report import Report
from contracts.codec import all_zero, filled
from helpers.cpu_kernels import compile_kernels

from kvstore.codecs.base import codec_by_name
from kvstore.codecs.kvq_kernels import SOURCES, KvqKernels
from kvstore.proto.frame import parse_header

CPU = torch.device("cpu")


def test_what_is_measured_is_what_the_frame_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    kernels = ["kvq_open", "kvq_symbols", "kvq_numbers_bfloat16"]
    decoder = KvqKernels(CPU, compile_kernels(tmp_path, SOURCES, kernels, 32))
    monkeypatch.setattr(gpu_codecs, "REPEATS", 1)
    frame = gpu_codecs.make_frame("kvq:1", (1, 2, 16, 24))
    case = gpu_codecs.Case.of(frame, 2, CPU)
    report = Report("gpu_codecs")
    gpu_codecs.measure("kvq:1", case, decoder, lambda work: work, report)
    assert list(report.values) == ["kvq1_decode_x2_vs_d2d"]
    header = parse_header(frame)
    tensors = filled(header.layout, all_zero)
    codec_by_name("kvq:1").decode_into(header, frame, tensors)
    wanted = torch.from_numpy(tensors[0][0][0].view("i2")).view(torch.bfloat16)
    (pages,), ids = case.paged.pages, case.paged.tables[0]
    found = [pages.views[0][0][ids[at // 16], :, at % 16] for at in range(48)]
    assert torch.equal(torch.stack(found, 1), torch.cat([wanted, wanted], 1))
    assert case.decoded_bytes == 2 * header.layout.raw_bytes


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device: it would measure")
def test_without_a_cuda_device_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_codecs.main(["--json"]) == 0
    text, last = capsys.readouterr().out.splitlines()
    assert text == "skipped: no CUDA device"
    assert json.loads(last) == {"bench": "gpu_codecs", "values": {}}
