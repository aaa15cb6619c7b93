import sys; sys.path.insert(0,'/work/main/tests/matching')
import pytest
from test_families import planted
CASES=["T5ForConditionalGeneration","T5ForConditionalGeneration-gated","BartForConditionalGeneration","MBartForConditionalGeneration","WhisperForConditionalGeneration","CLIPModel","SiglipModel","Dinov2ForImageClassification","Dinov2ForImageClassification-swiglu","BeitForMaskedImageModeling-shared","ModernBertForMaskedLM-biases","Wav2Vec2ForCTC","HubertForCTC-stable"]
@pytest.mark.parametrize("rescale", ["none", "joint"])
@pytest.mark.parametrize("level", ["paper", "permutation", "orthogonal", "full"])
@pytest.mark.parametrize("case", CASES)
def test_planted(tiny, case, level, rescale):
    before, after = planted(tiny, case, level, rescale)
    print(before, after)
    assert before > 0.05
    assert after < 1e-5
