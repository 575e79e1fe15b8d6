//! Texts to be scored: cut from a file, or as a stored reference has them.

use std::path::Path;

use anyhow::{Context, bail, ensure};
use lily_model::tokenizer::Tokenizer;
use safetensors::{Dtype, SafeTensors};

use super::score::Row;

/// Tokens that are read from an empty context.
#[derive(Clone, Debug, PartialEq)]
pub struct Document {
    /// They.
    pub tokens: Vec<u32>,
    /// For each position, whether the next token is one that the model was trained to write; `None` where nobody knows.
    pub answers: Option<Vec<bool>>,
    /// What the stored reference says of each position.
    pub stored: Option<Vec<Row>>,
}

impl Document {
    /// The tokens after which another comes.
    pub fn positions(&self) -> &[u32] {
        &self.tokens[..self.tokens.len() - 1]
    }
}

/// The text of the file at `path` in windows of `window` tokens. Markers of the chat template in it are markers.
pub fn cut(path: &Path, tokenizer: &Tokenizer, window: usize) -> anyhow::Result<Vec<Document>> {
    let text = std::fs::read_to_string(path)
        .with_context(|| format!("{} cannot be read as text", path.display()))?;
    let tokens = tokenizer.encode(&text);
    let windows = tokens.chunks(window).filter(|tokens| tokens.len() > 1);
    Ok(windows.map(|tokens| Document { tokens: tokens.to_vec(), answers: None, stored: None }).collect())
}

/// The first documents, cut so that they have no more than `positions` positions together.
pub fn limit(mut documents: Vec<Document>, positions: Option<usize>) -> Vec<Document> {
    let mut left = positions.unwrap_or(usize::MAX);
    documents.retain_mut(|document| {
        let count = document.positions().len().min(left);
        left -= count;
        document.tokens.truncate(count + 1);
        count > 0
    });
    documents
}

/// The documents of a stored reference: a safetensors file of `tokens` (i32, all documents one after the other), `lengths`
/// (i32, tokens of each), and for every position but a document's last `target_logprobs` (f32, of the next token), `best`
/// (i32, the likeliest) and, where known, `answer` (u8, whether the model was trained to write it).
pub fn stored(path: &Path) -> anyhow::Result<Vec<Document>> {
    let bytes =
        std::fs::read(path).with_context(|| format!("--reference {} cannot be read", path.display()))?;
    read(&bytes).with_context(|| format!("--reference {} is no stored reference", path.display()))
}

fn read(bytes: &[u8]) -> anyhow::Result<Vec<Document>> {
    let file = SafeTensors::deserialize(bytes)?;
    let tensor = |name: &str, dtype: Dtype| -> anyhow::Result<Vec<u8>> {
        let tensor = file.tensor(name)?;
        ensure!(tensor.dtype() == dtype, "{name} is {:?}, and {dtype:?} is read", tensor.dtype());
        Ok(tensor.data().to_vec())
    };
    let ids = |name: &str| -> anyhow::Result<Vec<u32>> {
        let bytes = tensor(name, Dtype::I32)?;
        let ids = bytes.as_chunks::<4>().0.iter().map(|id| u32::try_from(i32::from_le_bytes(*id)));
        ids.collect::<Result<_, _>>().with_context(|| format!("{name} has a number below 0"))
    };
    let (tokens, lengths, best) = (ids("tokens")?, ids("lengths")?, ids("best")?);
    let logprobs = tensor("target_logprobs", Dtype::F32)?;
    let logprobs = logprobs.as_chunks::<4>().0.iter().map(|value| f64::from(f32::from_le_bytes(*value)));
    let rows: Vec<Row> = logprobs.zip(&best).map(|(logprob, &best)| Row { logprob, best }).collect();
    let answers = file.tensor("answer").is_ok().then(|| tensor("answer", Dtype::U8)).transpose()?;

    let mut documents = Vec::new();
    let (mut token, mut position) = (0, 0);
    for length in lengths {
        let length = length as usize;
        ensure!(length > 1, "a document of {length} tokens has nothing to predict");
        let rows = rows.get(position..position + length - 1);
        let (Some(tokens), Some(rows)) = (tokens.get(token..token + length), rows) else {
            bail!("its documents have more tokens or positions than there are")
        };
        let flags = answers.as_ref().map(|answers| answers.get(position..position + length - 1));
        let answers = match flags {
            Some(None) => bail!("its documents have more positions than `answer`"),
            Some(Some(flags)) => Some(flags.iter().map(|&flag| flag != 0).collect()),
            None => None,
        };
        documents.push(Document { tokens: tokens.to_vec(), answers, stored: Some(rows.to_vec()) });
        (token, position) = (token + length, position + length - 1);
    }
    Ok(documents)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document(tokens: &[u32]) -> Document {
        Document { tokens: tokens.to_vec(), answers: None, stored: None }
    }

    #[test]
    fn a_limit_counts_positions_and_not_tokens() {
        let documents = vec![document(&[1, 2, 3]), document(&[4, 5, 6, 7]), document(&[8, 9])];
        assert_eq!(limit(documents.clone(), None), documents);
        assert_eq!(limit(documents, Some(3)), [document(&[1, 2, 3]), document(&[4, 5])]);
    }

    #[test]
    fn what_is_no_reference_is_refused() {
        assert!(read(b"something else").is_err());
        let one = |name: &str, dtype, bytes: &[u8]| {
            let view = safetensors::tensor::TensorView::new(dtype, vec![1], bytes).unwrap();
            safetensors::serialize([(name, view)], None).unwrap()
        };
        assert!(read(&one("tokens", Dtype::I32, &[1, 0, 0, 0])).is_err());
        assert!(read(&one("tokens", Dtype::U8, &[1])).unwrap_err().to_string().contains("U8"));
    }
}
