//! What a request may ask of the sampler, and the ranges of it.

/// The most alternatives that can be reported per token, as in OpenAI's API.
pub const MAX_LOGPROBS: usize = 20;

/// How the tokens of one sequence are chosen. The default is greedy. The order in which the fields act is
/// described at [`crate::sampler`].
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Logits are divided by this; 0 takes the most probable token. At least 0.
    pub temperature: f32,
    /// Only the `top_k` most probable tokens, the lowest ids among equals; 0 keeps all.
    pub top_k: usize,
    /// Only the fewest most probable tokens that together hold this probability, at least one. 0 to 1; 1
    /// keeps all.
    pub top_p: f32,
    /// Only tokens at least this probable relative to the most probable one. 0 to 1; 0 keeps all.
    pub min_p: f32,
    /// Logits of tokens in the prompt or the answer are divided by this where positive, multiplied where
    /// negative. Above 0; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens that the answer holds. -2 to 2; 0 is off.
    pub presence_penalty: f32,
    /// Subtracted from a token's logit once for each time that the answer holds it. -2 to 2; 0 is off.
    pub frequency_penalty: f32,
    /// Added to the logits of these tokens, -100 to 100. A token named twice gets both.
    pub logit_bias: Vec<(u32, f32)>,
    /// Seed of the random choice; `None` takes a fresh one.
    pub seed: Option<u64>,
    /// Report the chosen token's log-probability and those of this many most probable ones (0 to
    /// [`MAX_LOGPROBS`]); `None` reports nothing.
    pub logprobs: Option<usize>,
}

impl Default for SamplingParams {
    fn default() -> SamplingParams {
        SamplingParams {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: None,
            logprobs: None,
        }
    }
}

/// A sampling parameter outside its range.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{field} is {value}; it must be {range}")]
pub struct InvalidParam {
    /// Name of the field in [`SamplingParams`], which is also its name in the protocols.
    pub field: &'static str,
    /// What was given.
    pub value: String,
    /// What is allowed, in words.
    pub range: String,
}

impl SamplingParams {
    /// Checks every field against its range, and token ids against a vocabulary of `vocab`.
    pub fn validate(&self, vocab: usize) -> Result<(), InvalidParam> {
        let check = |field, value: f32, ok: bool, range: &str| {
            if ok {
                Ok(())
            } else {
                Err(InvalidParam { field, value: value.to_string(), range: range.into() })
            }
        };
        let temperature = self.temperature;
        check(
            "temperature",
            temperature,
            temperature.is_finite() && temperature >= 0.0,
            "a finite number of at least 0",
        )?;
        check("top_p", self.top_p, (0.0..=1.0).contains(&self.top_p), "from 0 to 1")?;
        check("min_p", self.min_p, (0.0..=1.0).contains(&self.min_p), "from 0 to 1")?;
        let repetition = self.repetition_penalty;
        check(
            "repetition_penalty",
            repetition,
            repetition.is_finite() && repetition > 0.0,
            "a finite number above 0",
        )?;
        for (field, value) in
            [("presence_penalty", self.presence_penalty), ("frequency_penalty", self.frequency_penalty)]
        {
            check(field, value, (-2.0..=2.0).contains(&value), "from -2 to 2")?;
        }
        for &(token, bias) in &self.logit_bias {
            check("logit_bias", bias, (-100.0..=100.0).contains(&bias), "from -100 to 100 for every token")?;
            if token as usize >= vocab {
                return Err(InvalidParam {
                    field: "logit_bias",
                    value: format!("for token {token}"),
                    range: format!("for tokens below {vocab}, the size of the vocabulary"),
                });
            }
        }
        match self.logprobs {
            Some(count) if count > MAX_LOGPROBS => Err(InvalidParam {
                field: "logprobs",
                value: count.to_string(),
                range: format!("from 0 to {MAX_LOGPROBS}"),
            }),
            _ => Ok(()),
        }
    }

    /// Whether the most probable token is taken, without a random choice.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    /// Whether the token that a device chooses by itself, the largest logit, is all that is asked for.
    pub fn device_can_sample(&self) -> bool {
        self.is_greedy()
            && self.logprobs.is_none()
            && self.logit_bias.is_empty()
            && self.repetition_penalty == 1.0
            && self.presence_penalty == 0.0
            && self.frequency_penalty == 0.0
    }
}
