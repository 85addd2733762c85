"""Error measures, as their definitions read: loops over heads, queries and tokens, in extended precision."""

from __future__ import annotations

import numpy as np

Wide = np.longdouble


def relative_error(original: np.ndarray, restored: np.ndarray) -> float:
    """``|x - y| / |x|`` over all numbers."""
    x, y = (array.astype(np.float64).astype(Wide).ravel() for array in (original, restored))
    return float(np.sqrt(((x - y) ** 2).sum() / (x**2).sum()))


def attention_errors(
    queries: np.ndarray, keys: tuple[np.ndarray, np.ndarray], values: tuple[np.ndarray, np.ndarray]
) -> tuple[float, float]:
    """Relative errors of the logits, their mean over the tokens removed, and of the attention output.

    ``queries`` is ``[kv_heads, queries, head_dim]``; the pairs, original and restored, ``[tokens, heads, head_dim]``.
    """
    logit_error = logit_energy = output_error = output_energy = Wide(0)
    for head, head_queries in enumerate(queries):
        for query in head_queries.astype(Wide):
            both = []
            for key, value in zip(keys, values, strict=True):
                logits = np.array([(query * token).sum() for token in _wide(key, head)]) / np.sqrt(Wide(len(query)))
                weights = np.exp(logits - logits.max())
                weights /= weights.sum()
                output = sum(weight * token for weight, token in zip(weights, _wide(value, head), strict=True))
                both.append((logits - logits.mean(), output))
            (logits, output), (other_logits, other_output) = both
            logit_error += ((logits - other_logits) ** 2).sum()
            logit_energy += (logits**2).sum()
            output_error += ((output - other_output) ** 2).sum()
            output_energy += (output**2).sum()
    return float(np.sqrt(logit_error / logit_energy)), float(np.sqrt(output_error / output_energy))


def kl_divergence(p_logits: np.ndarray, q_logits: np.ndarray) -> float:
    """Mean over the rows of ``sum p log(p / q)``, nats."""
    total = Wide(0)
    for row_p, row_q in zip(p_logits.astype(Wide), q_logits.astype(Wide), strict=True):
        p, q = (np.exp(row - row.max()) / np.exp(row - row.max()).sum() for row in (row_p, row_q))
        total += (p * np.log(p / q)).sum()
    return float(total / len(p_logits))


def _wide(array: np.ndarray, head: int) -> np.ndarray:
    return array[:, head].astype(np.float64).astype(Wide)
