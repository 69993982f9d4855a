"""Write a tiny HuBERT with random weights into the folder hubert, and noise.wav."""

import numpy as np
import soundfile
import transformers

settings = transformers.HubertConfig(
    hidden_size=16,
    num_hidden_layers=3,
    num_attention_heads=2,
    intermediate_size=32,
    conv_dim=(8,) * 7,
    num_conv_pos_embeddings=16,
    num_conv_pos_embedding_groups=4,
)
transformers.HubertModel(settings).save_pretrained("hubert")
transformers.Wav2Vec2FeatureExtractor().save_pretrained("hubert")

noise = 0.1 * np.random.default_rng(0).standard_normal(16000)
soundfile.write("noise.wav", noise, 16000)
