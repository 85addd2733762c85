"""Codecs side by side on one cache: what they weigh, how fast they are, what they cost, and where they pay.

:func:`load` brings a cache into memory once; :func:`measure` puts one codec to work on it and :func:`measure_peer` one
general compressor. What a row tells beyond that follows from it: :mod:`kvzip.bench.breakeven` says when it pays,
:mod:`kvzip.bench.records` puts it into JSON and CSV. What shows rows to people stands elsewhere.
"""

from kvzip.bench.attention import AttentionErrors, Queries, attention_errors, draw_queries, read_queries
from kvzip.bench.breakeven import Link, links
from kvzip.bench.ladder import Candidate, candidates
from kvzip.bench.measuring import Judge, measure
from kvzip.bench.peers import Peer, copying, installed_peers, measure_peer
from kvzip.bench.rows import Row
from kvzip.bench.sample import Sample, load
from kvzip.bench.steps import Step, plan

__all__ = [
    "AttentionErrors",
    "Candidate",
    "Judge",
    "Link",
    "Peer",
    "Queries",
    "Row",
    "Sample",
    "Step",
    "attention_errors",
    "candidates",
    "copying",
    "draw_queries",
    "installed_peers",
    "links",
    "load",
    "measure",
    "measure_peer",
    "plan",
    "read_queries",
]
