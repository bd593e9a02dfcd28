"""Speech as images: filter banks against Kaldi's formula, and the features of the release."""

import io
import wave

import numpy as np
import pytest
import torch

from fedlib.data.datasets import DataSet, load_dataset
from fedlib.data.transforms import render
from fedlib_lab.formats.speech import HIGH, LOW, MEAN, SD, STATS, decode_speech, filter_banks, mel_filters, to_image

pytestmark = pytest.mark.usefixtures("cache")


def test_filter_banks_find_a_tone():
    rate, f = 16_000, 1000.0
    tone = 0.5 * torch.sin(2 * torch.pi * f * torch.arange(rate) / rate)
    features = filter_banks(tone, rate)
    assert features.shape == (128, 128) and not features[98:].any()  # 98 windows fit in one second, then padding
    centres = 700 * (np.exp(np.linspace(1127 * np.log1p(20 / 700), 1127 * np.log1p(8000 / 700), 130)[1:-1] / 1127) - 1)
    assert abs(centres[features[50].argmax()] - f) < 30


def test_filter_banks_equal_kaldis():
    """Values of torchaudio 2.11's Kaldi-compatible fbank (hanning, htk_compat, no dither) on the same signal."""
    t = torch.arange(16_000) / 16_000
    signal = 0.5 * torch.sin(2 * torch.pi * 1000 * t) + 0.1 * torch.sin(2 * torch.pi * 3300 * t * t)
    features = filter_banks(signal, 16_000)
    reference = {(0, 0): -3.879, (0, 45): 4.295, (50, 20): -13.269, (50, 45): 4.295, (50, 90): 3.278, (97, 127): -9.581}
    for at, value in reference.items():
        assert features[at].item() == pytest.approx(value, abs=2e-3)


def test_mel_filters_are_triangles():
    filters = mel_filters(40, 512, 16_000)
    assert filters.shape == (40, 257) and filters.min() == 0 and filters.max() <= 1
    assert ((filters > 0).sum(0) <= 2).all()  # neighbours overlap, no others


def kaldi_fbank(x, rate, bins=128):
    """Kaldi's log-mel filter banks in numpy, frame by frame and bin by bin (facts 7.3: Hann, no dither, no energy)."""
    length, shift, size = rate * 25 // 1000, rate * 10 // 1000, 1
    while size < length:
        size *= 2
    mel = lambda f: 1127.0 * np.log(1 + f / 700.0)  # noqa: E731
    step = (mel(rate / 2) - mel(20.0)) / (bins + 1)
    weights = np.zeros((bins, size // 2 + 1))
    for b in range(bins):
        left, centre, right = (mel(20.0) + (b + k) * step for k in range(3))
        for k in range(size // 2):
            m = mel(k * rate / size)
            if left < m < right:
                weights[b, k] = (m - left) / (centre - left) if m <= centre else (right - m) / (right - centre)
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(length) / (length - 1))
    frames = []
    for start in range(0, len(x) - length + 1, shift):
        frame = x[start : start + length].astype(np.float64)
        frame = frame - frame.mean()
        frame = np.concatenate(([frame[0] * (1 - 0.97)], frame[1:] - 0.97 * frame[:-1])) * hann
        power = np.abs(np.fft.fft(frame, size)[: size // 2 + 1]) ** 2
        frames.append(np.log(np.maximum(weights @ power, 1.1920929e-07)))
    return np.array(frames)


@pytest.mark.parametrize("rate", [8_000, 16_000])
def test_filter_banks_equal_an_independent_implementation(rate):
    rng = np.random.default_rng(rate)
    t = np.arange(rate * 3 // 5) / rate
    x = (0.3 * np.sin(2 * np.pi * (200 + 900 * t) * t) + 0.05 * rng.standard_normal(len(t))).astype(np.float32)
    ours, theirs = filter_banks(torch.from_numpy(x), rate).numpy(), kaldi_fbank(x, rate)
    assert len(theirs) == 58 and not ours[58:].any()  # (600 - 25) / 10 + 1 = 58 whole windows, then zeros
    np.testing.assert_allclose(ours[:58], theirs, atol=2e-3)
    long = np.tile(x, 4)  # 2.4 s are 238 windows, cut to 128
    np.testing.assert_allclose(
        filter_banks(torch.from_numpy(long), rate).numpy(), kaldi_fbank(long, rate)[:128], atol=5e-3
    )


def test_the_network_sees_the_releases_features():
    """(x + 4.2677393) / (2 x 4.5689974), nothing else, bilinearly enlarged to 224 x 224 with time as height."""
    features = torch.linspace(-15.9, 11.9, 128 * 128).view(128, 128)
    data = DataSet(
        "speech", torch.from_numpy(to_image(features))[None], torch.zeros(1), torch.empty(0), torch.empty(0), ("a",),
        stats=STATS,
    )  # fmt: skip
    expected = (features + 4.2677393) / (2 * 4.5689974)
    seen = render(data.train_inputs, None, 128, *data.mean_std())[0]
    assert seen.shape == (3, 128, 128) and (seen - expected).abs().max() <= 0.5 * (HIGH - LOW) / 255 + 1e-6
    assert 2 * SD * 0.5 * (HIGH - LOW) / 255 < 0.06 and (MEAN, SD) == (-4.2677393, 4.5689974)
    big = render(data.train_inputs, None, 224, *data.mean_std())[0, 0]
    # output row 0 lies at (0 + 0.5) * 128 / 224 - 0.5 = -0.21: the edge; row 1 at 0.357 between rows 0 and 1
    column = expected[:, 0]
    assert big[0, 0].item() == pytest.approx(column[0].item(), abs=0.01)
    assert big[1, 0].item() == pytest.approx((0.643 * column[0] + 0.357 * column[1]).item(), abs=0.01)


def wav(seconds, tone, rate=16_000):
    t = np.arange(int(seconds * rate)) / rate
    out = io.BytesIO()
    with wave.open(out, "wb") as f:
        f.setnchannels(1), f.setsampwidth(2), f.setframerate(rate)
        f.writeframes((8000 * np.sin(2 * np.pi * tone * t)).astype("<i2").tobytes())
    return out.getvalue()


def test_speech_commands_keeps_the_busiest_speakers_and_no_noise():
    """Columns as on the hub, where background noise has no speaker: top speakers by clips, split per class."""
    from datasets import Audio, ClassLabel, Dataset, Features, Value

    clips = [("yes", "ann")] * 6 + [("no", "ann")] * 2 + [("yes", "bob")] * 5 + [("_silence_", None)] * 9
    clips += [("no", "bob")] * 1 + [("no", "cy")] * 2
    names = ["yes", "no", "_silence_"]
    stored = {"bytes": Value("binary"), "path": Value("string")}
    features = Features({"audio": stored, "label": ClassLabel(names=names), "speaker_id": Value("string")})
    table = Dataset.from_dict(
        {
            "audio": [{"bytes": wav(0.1, 300), "path": None}] * len(clips),
            "label": [names.index(word) for word, _ in clips], "speaker_id": [who for _, who in clips],
        },
        features=features,
    ).cast_column("audio", Audio())  # fmt: skip
    tensors, classes = decode_speech(table, "label", "speaker_id", speakers=2)
    assert classes == ["no", "yes"]  # sorted by name
    # ann: int(0.8 * 6) = 4 of yes train, int(0.8 * 2) = 1 of no; bob: int(0.8 * 5) = 4, int(0.8 * 1) = 0; cy has fewest
    assert (
        tensors["owners"].tolist() == [0] * 5 + [1] * 4 and tensors["train_labels"].tolist() == [1] * 4 + [0] + [1] * 4
    )
    assert tensors["test_owners"].tolist() == [0, 0, 0, 1, 1] and sorted(tensors["test_labels"].tolist()) == [
        0,
        0,
        1,
        1,
        1,
    ]
    assert torch.equal(tensors["stats"], STATS) and tensors["train_images"].shape == (9, 1, 128, 128)


def own_clips(folder, clips):
    """A set of one's own: (wave bytes, label, speaker) each."""
    from datasets import Dataset

    rows = [{"audio": {"bytes": x, "path": None}, "label": c, "speaker_id": who} for x, c, who in clips]
    Dataset.from_list(rows).to_parquet(str(folder / "train.parquet"))
    return load_dataset(str(folder))


def test_clips_that_are_cut_are_said(tmp_path):
    with pytest.warns(UserWarning, match="5 of 10 clips are longer than 1.3 seconds and are cut"):
        own_clips(tmp_path, [(wav(5 if k % 2 else 1.3, 300), "ab"[k // 5], "ann") for k in range(10)])


def test_clips_of_two_rates_are_refused(tmp_path):
    """A bin of 8 kHz is another tone than that of 16 kHz."""
    with pytest.raises(ValueError, match="row 1 holds no .*8000 samples a second, and those before have 16000"):
        own_clips(tmp_path, [(wav(0.5, 300, rate), "a", "ann") for rate in (16_000, 8_000) * 5])


@pytest.mark.parametrize("often", [1, 5], ids=["all alone", "one alone"])
def test_a_class_that_would_be_tested_alone_is_refused(tmp_path, often):
    clips = [(wav(0.5, 300), f"word {w}", who) for w in range(2) for who in ("ann", "bob")] * often
    with pytest.raises(ValueError, match="'the other clips' has labels that .* has not: rare.*; allowed: classes with"):
        own_clips(tmp_path, [*clips, (wav(0.5, 300), "rare", "ann")])
