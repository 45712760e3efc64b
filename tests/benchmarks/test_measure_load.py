"""Requests under load: the document shows the recorded figures, and requests have their rate and popularity."""

import json

import pytest

from benchmarks.measure_load import DOCUMENTS, PAGE, RECORDED, RequestTrace, arrivals, render_page, throughput


def test_the_document_shows_the_recorded_figures():
    assert render_page(json.loads(RECORDED.read_text(encoding="utf-8"))) == PAGE.read_text(encoding="utf-8")


def test_the_throughput_is_where_the_mean_crosses_the_slo():
    assert throughput([(1.0, 2.0), (0.5, 1.0), (2.0, 10.0)], 6.0) == pytest.approx(1.5)
    assert throughput([(0.5, 1.0), (1.0, 2.0)], 6.0) == 1.0


def test_arrivals_have_the_rate():
    at = arrivals(50, 4.0)
    assert at == sorted(at) and len(at) / at[-1] == pytest.approx(4.0)


def test_few_documents_get_most_requests():
    requests = RequestTrace().requests
    assert all(len(set(request)) == 4 for request in requests)
    asked = sorted((sum(each in request for request in requests) for each in range(DOCUMENTS)), reverse=True)
    assert asked[0] > len(requests) / 2 and sum(asked) == 4 * len(requests)
