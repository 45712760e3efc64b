"""The prefill times that `bench store` counts with when no measured profile is given."""

from ragblend.kvstore.profile import PrefillProfile

ABOUT = (
    "an estimate, not a measurement: 0.774 ms a token and 0.00026 ms a pair of tokens, through the README's two full "
    "prefills of SmolLM2-135M (bfloat16, 2 cores of an AMD EPYC with AVX-512 BF16): 2,076 tokens in 2,728 ms, about "
    "3,145 in 5,006 ms"
)
TOKEN_MS, PAIR_MS = 0.774, 0.00026
CACHED = (0, 512, 1024, 2048, 4096, 8192, 16384)
NEW = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def default_profile() -> PrefillProfile:
    """The estimate as a grid, so that the default goes the same way as a measured one."""
    return PrefillProfile.of(ABOUT, CACHED, NEW, _ms)


def _ms(cached: int, new: int) -> float:
    pairs = new * (
        2 * cached + new
    )  # twice the scores: new rows against all before them, and half of themselves
    return TOKEN_MS * new + PAIR_MS * pairs
