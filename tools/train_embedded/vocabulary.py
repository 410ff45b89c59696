"""The family's tokenizer: byte-level BPE of 1,024 tokens, trained on the corpus.

All 256 bytes are tokens, so any text can be encoded, if at length for text unlike the corpus.
"""

from itertools import islice

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tools.train_embedded.corpus import documents

VOCABULARY_SIZE = 1024
END_TOKEN = "<|endoftext|>"
PAD_TOKEN = "<|pad|>"
CONTEXT_TOKENS = 1024
TRAINING_MIXTURE = {"easy": 0.47, "hard": 0.47, "unrelated": 0.06}
TRAINING_DOCUMENTS = 6000


def train_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Train the tokenizer on documents of every kind."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[END_TOKEN, PAD_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sample = islice(documents(TRAINING_MIXTURE, seed), TRAINING_DOCUMENTS)
    tokenizer.train_from_iterator((document.text for document in sample), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_TOKEN,
        pad_token=PAD_TOKEN,
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )
