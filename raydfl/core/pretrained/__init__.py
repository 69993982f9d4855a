"""Pretrained encoders of recordings in a folder, as Hugging Face's transformers writes them: wav2vec2, HuBERT, AST, Whisper's.

Both the features of kind ``pretrained`` and the network ``pretrained`` are made of one of these: a front end (samples in, what the
encoder takes out), a stem, some layers and a norm after the last. Whatever is computed once for each clip are features, the rest is
the network. Nothing is downloaded and no code of the folder is run: weights are read from safetensors alone.

Begin with folder.py (what lies there), then front_end.py and encoder.py.
"""

from raydfl.core.pretrained.encoder import Encoder, pooled
from raydfl.core.pretrained.folder import EncoderFolder, encoder_digest, read_encoder_folder
from raydfl.core.pretrained.front_end import EncoderFrontEnd

__all__ = ["Encoder", "EncoderFolder", "EncoderFrontEnd", "encoder_digest", "pooled", "read_encoder_folder"]
