"""Pretrained audio encoders in folders of Hugging Face's transformers: wav2vec2, HuBERT, AST, Whisper.

An encoder has a front end (samples to samples or spectrograms), a stem, layers and a final norm. Features of kind ``pretrained``
cache the first of these once for each clip; the network ``pretrained`` runs the rest. Nothing is downloaded, and no code of the
folder is run: weights come from safetensors files only.

Start with folder.py, then read front_end.py and encoder.py.
"""

from raydfl.core.pretrained.encoder import Encoder, average_bands, pool_tokens, write_encoder
from raydfl.core.pretrained.folder import EncoderFolder, encoder_digest, read_encoder_folder
from raydfl.core.pretrained.front_end import EncoderFrontEnd

__all__ = [
    "Encoder",
    "EncoderFolder",
    "EncoderFrontEnd",
    "average_bands",
    "encoder_digest",
    "pool_tokens",
    "read_encoder_folder",
    "write_encoder",
]
