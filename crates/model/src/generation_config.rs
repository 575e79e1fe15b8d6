//! `generation_config.json`: where the model's answers end, and the sampling that its makers recommend.
//!
//! The file is optional, and so is every field. Values that no sampler could honour are refused here, by
//! name, rather than surfacing in the middle of a request.

use serde_json::{Map, Value};

/// What `generation_config.json` says; every field is absent in a checkpoint without the file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationConfig {
    /// Tokens that end an answer.
    pub eos_token_ids: Vec<u32>,
    /// Whether the makers recommend sampling at all.
    pub do_sample: Option<bool>,
    /// Divides the logits; at least 0.
    pub temperature: Option<f32>,
    /// Keeps the likeliest tokens that sum to this probability; above 0, at most 1.
    pub top_p: Option<f32>,
    /// Keeps this many of the likeliest tokens; 0 keeps all.
    pub top_k: Option<u32>,
    /// Keeps tokens of at least this share of the likeliest one's probability; 0 to 1.
    pub min_p: Option<f32>,
    /// Divides (where positive) or multiplies (where negative) the logits of tokens already seen; above 0.
    pub repetition_penalty: Option<f32>,
}

/// Why a `generation_config.json` cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum GenerationConfigError {
    /// Not JSON, or not an object.
    #[error("generation_config.json is not a JSON object: {0}; take it from the model's repository again")]
    Malformed(String),
    /// A field with a value that means nothing.
    #[error("generation_config.json has {field} = {found}; expected {expected}")]
    Field {
        /// The field.
        field: &'static str,
        /// Its value, as JSON.
        found: String,
        /// What it may hold.
        expected: &'static str,
    },
}

impl GenerationConfig {
    /// Reads the contents of a `generation_config.json`. Fields that Lily does not know are ignored, as the
    /// file carries those of many programs.
    pub fn from_json(json: &[u8]) -> Result<GenerationConfig, GenerationConfigError> {
        let fields: Map<String, Value> = serde_json::from_slice(json)
            .map_err(|error| GenerationConfigError::Malformed(error.to_string()))?;
        let fields = Fields(fields);
        Ok(GenerationConfig {
            eos_token_ids: fields.token_ids("eos_token_id")?,
            do_sample: fields.read("do_sample", "true or false", Value::as_bool)?,
            temperature: fields.number("temperature", "a number of at least 0", |x| x >= 0.0)?,
            top_p: fields.number("top_p", "a number above 0 and at most 1", |x| x > 0.0 && x <= 1.0)?,
            top_k: fields.read("top_k", "a whole number of at least 0", as_u32)?,
            min_p: fields.number("min_p", "a number from 0 to 1", |x| (0.0..=1.0).contains(&x))?,
            repetition_penalty: fields.number("repetition_penalty", "a number above 0", |x| x > 0.0)?,
        })
    }
}

/// The file's object; `null` counts as absent, as it does for the program that writes these files.
struct Fields(Map<String, Value>);

impl Fields {
    fn read<T>(
        &self,
        field: &'static str,
        expected: &'static str,
        parse: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>, GenerationConfigError> {
        match self.0.get(field) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match parse(value) {
                Some(parsed) => Ok(Some(parsed)),
                None => Err(GenerationConfigError::Field { field, found: value.to_string(), expected }),
            },
        }
    }

    fn number(
        &self,
        field: &'static str,
        expected: &'static str,
        allowed: impl Fn(f32) -> bool,
    ) -> Result<Option<f32>, GenerationConfigError> {
        self.read(field, expected, |value| {
            let number = value.as_f64()? as f32;
            (number.is_finite() && allowed(number)).then_some(number)
        })
    }

    fn token_ids(&self, field: &'static str) -> Result<Vec<u32>, GenerationConfigError> {
        let ids = self.read(field, "a token id or a list of token ids", |value| match value {
            Value::Array(ids) => ids.iter().map(as_u32).collect(),
            one => as_u32(one).map(|id| vec![id]),
        })?;
        Ok(ids.unwrap_or_default())
    }
}

fn as_u32(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|number| u32::try_from(number).ok())
}

#[cfg(test)]
mod tests {
    use super::{GenerationConfig, GenerationConfigError};

    fn read(json: &str) -> Result<GenerationConfig, GenerationConfigError> {
        GenerationConfig::from_json(json.as_bytes())
    }

    #[test]
    fn one_end_of_sequence_id_or_several() {
        assert_eq!(read(r#"{"eos_token_id": 7}"#).unwrap().eos_token_ids, [7]);
        assert_eq!(read(r#"{"eos_token_id": [7, 9]}"#).unwrap().eos_token_ids, [7, 9]);
        assert_eq!(read(r#"{"eos_token_id": null}"#).unwrap(), GenerationConfig::default());
    }

    #[test]
    fn the_makers_sampling_is_read_and_other_programs_fields_are_not() {
        let config = read(
            r#"{"do_sample": true, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0,
                "repetition_penalty": 1.05, "transformers_version": "5.17.0", "pad_token_id": 3}"#,
        );
        let expected = GenerationConfig {
            eos_token_ids: vec![],
            do_sample: Some(true),
            temperature: Some(0.6),
            top_p: Some(0.95),
            top_k: Some(20),
            min_p: Some(0.0),
            repetition_penalty: Some(1.05),
        };
        assert_eq!(config.unwrap(), expected);
    }

    #[test]
    fn a_value_that_means_nothing_is_refused_by_its_field() {
        for (json, field) in [
            (r#"{"eos_token_id": -1}"#, "eos_token_id = -1"),
            (r#"{"eos_token_id": ["a"]}"#, r#"eos_token_id = ["a"]"#),
            (r#"{"eos_token_id": 4294967296}"#, "eos_token_id = 4294967296"),
            (r#"{"do_sample": "yes"}"#, r#"do_sample = "yes""#),
            (r#"{"temperature": -0.5}"#, "temperature = -0.5"),
            (r#"{"temperature": 1e300}"#, "temperature = 1e"),
            (r#"{"top_p": 0}"#, "top_p = 0"),
            (r#"{"top_p": 1.5}"#, "top_p = 1.5"),
            (r#"{"top_k": 2.5}"#, "top_k = 2.5"),
            (r#"{"min_p": 2}"#, "min_p = 2"),
            (r#"{"repetition_penalty": 0}"#, "repetition_penalty = 0"),
        ] {
            let error = read(json).unwrap_err().to_string();
            assert!(error.contains(field), "{error}");
        }
        for json in ["", "[]", "{", "5"] {
            assert!(matches!(read(json), Err(GenerationConfigError::Malformed(_))));
        }
    }
}
