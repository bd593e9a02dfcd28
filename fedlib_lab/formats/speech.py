"""Speech as images: log-mel filter banks (facts of ReeFL's release) in torch ops, and SpeechCommands v2 by speaker.

Features: 25 ms Hann windows every 10 ms, 128 mel bins from 20 Hz to half the sampling rate, cut or padded to 128
frames, AudioSet statistics. They are stored like images, height = time; the network sees (x - MEAN) / (2 SD) and
nothing else, enlarged to its input.

Deviations: the features are stored in 8 bits (log energies are off by up to 0.06); the release's time shifts,
background noise and inverse-frequency sampling are left out (the paper does not mention them), classes are sorted by
name, and the per-speaker split is seeded.
"""

import io
import math
import warnings
import wave
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch

from fedlib.core.rng import numpy_generator
from fedlib.core.validation import shown
from fedlib.data.silence import load_public

from .decode import Layout, Part, train_and_test

MEAN, SD = -4.2677393, 4.5689974  # AudioSet, as AST uses them: features are (x - MEAN) / (2 SD)
# Stored range of the normalised features: silence is ln 1.2e-7 = -15.9, or -1.28. By Parseval a frame at full scale has
# at most 256 x 1.97^2 (pre-emphasis) x 149.6 (sum of the squared Hann weights) = 148,600 in all bins: 11.9, or 1.77.
LOW, HIGH = -1.3, 1.8
STATS = torch.tensor([[-LOW / (HIGH - LOW)], [1 / (HIGH - LOW)]])  # (byte / 255 - mean) / SD is the feature again
HUB_PARQUET = "hf://datasets/google/speech_commands@~parquet/v0.02/train/*.parquet"


@lru_cache(maxsize=8)
def mel_filters(bins: int, fft_size: int, rate: int, low: float = 20.0) -> torch.Tensor:
    """Build triangular filters (bins, fft_size // 2 + 1) on Kaldi's mel scale 1127 ln(1 + f / 700)."""
    mel = lambda f: 1127 * np.log1p(np.asarray(f) / 700)  # noqa: E731
    edges = np.linspace(mel(low), mel(rate / 2), bins + 2)[:, None]
    points = mel(np.arange(fft_size // 2 + 1) * rate / fft_size)[None]
    up, down = (points - edges[:-2]) / (edges[1:-1] - edges[:-2]), (edges[2:] - points) / (edges[2:] - edges[1:-1])
    return torch.from_numpy(np.clip(np.minimum(up, down), 0, None).astype(np.float32))


def filter_banks(signal: torch.Tensor, rate: int, bins: int = 128, frames: int = 128) -> torch.Tensor:
    """Compute log-mel energies (frames, bins) of a waveform in [-1, 1]; short clips are padded with zero features."""
    window, shift = int(0.025 * rate), int(0.010 * rate)
    fft_size = 1 << math.ceil(math.log2(window))
    x = torch.nn.functional.pad(signal, (0, max(0, window - len(signal)))).unfold(0, window, shift)
    x = x - x.mean(1, keepdim=True)
    x = x - 0.97 * torch.cat((x[:, :1], x[:, :-1]), 1)  # pre-emphasis
    power = torch.fft.rfft(x * torch.hann_window(window, periodic=False, device=signal.device), fft_size).abs() ** 2
    energies = power @ mel_filters(bins, fft_size, rate).T.to(signal.device)
    energies = energies[:frames].clamp(min=torch.finfo(torch.float32).eps).log()
    return torch.nn.functional.pad(energies, (0, 0, 0, frames - len(energies)))


def to_image(features: torch.Tensor) -> np.ndarray:
    """Quantise normalised features to uint8 (1, frames, bins)."""
    x = ((features - MEAN) / (2 * SD)).clamp(LOW, HIGH)
    return ((x - LOW) / (HIGH - LOW) * 255).round().to(torch.uint8).cpu().numpy()[None]


def read_wav(data: bytes) -> tuple[torch.Tensor, int]:
    """Read 16-bit PCM mono wave bytes -> (signal in [-1, 1], sampling rate)."""
    with wave.open(io.BytesIO(data)) as f:
        if f.getsampwidth() != 2 or f.getnchannels() != 1:
            raise ValueError(f"expected 16-bit mono wave data, got {8 * f.getsampwidth()} bits x {f.getnchannels()}")
        signal = np.frombuffer(f.readframes(f.getnframes()), "<i2").astype(np.float32) / 32768
        return torch.from_numpy(signal), f.getframerate()


def decode_speech(
    table, label: str, speaker: str, speakers: int | None = None, where: Callable[[int], str] = "row {}".format
) -> tuple[dict, list[str]]:
    """Turn a `datasets` table of wave bytes into arrays: of a speaker's n clips of a class int(0.8 n) train.

    The others test. Background noise (``_silence_``, nobody's) is left out; ``speakers`` keeps those with most clips.
    ``ValueError`` names the row (``where(i)``) of a clip that cannot be read.
    """
    from datasets import Audio

    column = next(c for c, f in table.features.items() if isinstance(f, Audio) or c == "audio")
    table = table.cast_column(column, Audio(decode=False)) if isinstance(table.features[column], Audio) else table
    feature, values = table.features[label], np.asarray(table[label])
    words = np.array([feature.names[v] for v in values] if hasattr(feature, "names") else [str(v) for v in values])
    said, given = np.where(words != "_silence_")[0], list(table[speaker])  # of noise it may be None
    for i in said.tolist():
        if not isinstance(given[i], str | int | float) or given[i] != given[i]:
            raise ValueError(f"{where(i)}: {speaker} = {shown(given[i])} is no speaker")
    ids, owners, clips = np.unique([str(given[i]) for i in said], return_inverse=True, return_counts=True)
    kept = np.isin(owners, np.argsort(-clips, kind="stable")[: speakers or len(ids)])
    rows, owners = said[kept], np.unique(owners[kept], return_inverse=True)[1]
    names, labels = np.unique(words[rows], return_inverse=True)
    images, first, long = [], 0, 0
    for i in rows:
        clip = table[int(i)][column]
        try:
            signal, rate = read_wav(clip["bytes"] if isinstance(clip, dict) else clip)
            if rate != (first := first or rate):
                raise ValueError(f"{rate} samples a second, and those before have {first}; allowed: one rate")
            images.append(to_image(filter_banks(signal, rate)))
            long += len(signal) >= 1.305 * rate
        except (wave.Error, EOFError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{where(int(i))} holds no wave data that can be read ({error})") from error
    if long:
        warnings.warn(f"{long} of {len(rows)} clips are longer than 1.3 seconds and are cut to these", stacklevel=2)
    images, test = np.stack(images), np.zeros(len(rows), bool)
    for o, c in np.unique(np.column_stack((owners, labels)), axis=0).tolist():
        mine = np.where((owners == o) & (labels == c))[0]
        test[numpy_generator(0, f"speech split {c}", client=o).permutation(mine)[int(0.8 * len(mine)) :]] = True
    part = Part(images, labels.astype(np.int64), owners, [str(n) for n in names])
    layout = Layout(where(0), "images", label, train="four fifths of each speaker's clips", test="the other clips")
    tensors, classes = train_and_test([part.take(~test), part.take(test)], layout)
    return tensors | {"stats": STATS}, classes


def read_speech_commands() -> tuple[dict, list[str]]:
    """Read SpeechCommands v2, 35 classes, the 250 speakers with most clips of the training list."""
    otherwise, files = "connect once, or put a copy under $FEDLIB_DATA/speech_commands", {"train": HUB_PARQUET}
    table = load_public("'speech_commands'", otherwise, "parquet", data_files=files, split="train")
    return decode_speech(table, "label", "speaker_id", speakers=250)
