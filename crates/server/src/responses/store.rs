//! Responses that can be continued and read again: the last ones, within bounds.
//!
//! A response keeps its own request's items and its output, and the id of the one that it continues; a conversation
//! is the chain of them. When one is used, those before it count as used after it, so that of a chain nobody asks
//! for any more the end goes first, and whatever is there has all that it needs, unless a client deleted it.

use std::sync::{Arc, Mutex, PoisonError};

use serde_json::Value;

use crate::lru::Lru;

/// Most bytes of JSON that are kept.
const MAX_BYTES: usize = 64 * 1024 * 1024;
/// Most responses that are kept.
const MAX_RESPONSES: usize = 4096;

/// A response that is kept.
#[derive(Clone, Debug, PartialEq)]
pub struct Kept {
    /// The response that it continues.
    pub previous: Option<String>,
    /// Its request's own items.
    pub items: Vec<Value>,
    /// The response as it was sent.
    pub response: Value,
}

/// A link of a chain is missing: this response is not kept, or not any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotKept(pub String);

/// The store. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Store(Arc<Mutex<Lru<Kept>>>);

impl Store {
    /// Keeps a response. One that is larger than the store is not kept.
    pub fn keep(&self, id: &str, kept: Kept) {
        let bytes = size(&kept.response) + kept.items.iter().map(size).sum::<usize>();
        if bytes > MAX_BYTES {
            tracing::warn!(id, bytes, "the response is too large to be kept");
            return;
        }
        self.with(|lru| {
            lru.insert(id, kept, bytes);
            chain(lru, id).ok();
            while lru.bytes() > MAX_BYTES || lru.len() > MAX_RESPONSES {
                lru.remove_oldest();
            }
        });
    }

    /// A response.
    pub fn get(&self, id: &str) -> Option<Arc<Kept>> {
        self.with(|lru| {
            let kept = lru.get(id)?;
            // Whatever it continues is used too, as far as that is there.
            chain(lru, id).ok();
            Some(kept)
        })
    }

    /// The response and all before it, the first one first.
    pub fn chain(&self, id: &str) -> Result<Vec<Arc<Kept>>, NotKept> {
        self.with(|lru| chain(lru, id))
    }

    /// An item of a response that is kept.
    pub fn item(&self, id: &str) -> Option<Value> {
        self.with(|lru| {
            let items = |kept: &Kept| {
                let output = kept.response["output"].as_array().into_iter().flatten();
                kept.items.iter().chain(output).find(|item| item["id"] == id).cloned()
            };
            lru.values().find_map(items)
        })
    }

    /// Forgets a response; whether there was one.
    pub fn delete(&self, id: &str) -> bool {
        self.with(|lru| lru.remove(id))
    }

    fn with<T>(&self, work: impl FnOnce(&mut Lru<Kept>) -> T) -> T {
        // Every change is complete before anything that could panic.
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The response and all before it, the first one first. This is a use of each, of the first one last.
fn chain(lru: &mut Lru<Kept>, id: &str) -> Result<Vec<Arc<Kept>>, NotKept> {
    let mut chain = Vec::new();
    let mut next = Some(id.to_string());
    while let Some(id) = next {
        let kept = lru.get(&id).ok_or(NotKept(id))?;
        next = kept.previous.clone();
        chain.push(kept);
    }
    chain.reverse();
    Ok(chain)
}

/// About what a value takes in memory.
fn size(value: &Value) -> usize {
    let inner = match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
        Value::String(text) => text.len(),
        Value::Array(list) => list.iter().map(size).sum(),
        Value::Object(map) => {
            map.iter().map(|(key, value)| key.len() + size_of::<String>() + size(value)).sum()
        }
    };
    size_of::<Value>() + inner
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn kept(previous: Option<&str>, text: &str) -> Kept {
        let response = json!({"output": [{"id": format!("msg_{text}"), "text": text}]});
        Kept {
            previous: previous.map(str::to_string),
            items: vec![json!({"id": format!("in_{text}")})],
            response,
        }
    }

    #[test]
    fn a_chain_is_read_from_its_beginning() {
        let store = Store::default();
        store.keep("a", kept(None, "a"));
        store.keep("b", kept(Some("a"), "b"));
        store.keep("c", kept(Some("b"), "c"));
        let chain = store.chain("c").unwrap();
        assert_eq!(
            chain.iter().map(|kept| &kept.items[0]["id"]).collect::<Vec<_>>(),
            ["in_a", "in_b", "in_c"]
        );
        assert_eq!(store.item("msg_b").unwrap()["text"], "b");
        assert!(store.delete("b") && !store.delete("b"));
        assert_eq!(store.chain("c"), Err(NotKept("b".to_string())));
        assert_eq!(store.chain("d"), Err(NotKept("d".to_string())));
        assert_eq!(store.chain("a").unwrap().len(), 1);
    }

    #[test]
    fn the_ends_of_chains_that_nobody_asks_for_go_first() {
        let store = Store::default();
        store.keep("old", kept(None, "old"));
        store.keep("old end", kept(Some("old"), "old end"));
        for count in 0..MAX_RESPONSES - 1 {
            store.keep(&format!("{count}"), kept(None, "x"));
        }
        assert!(store.get("old end").is_none() && store.get("old").is_some());
    }

    #[test]
    fn what_is_kept_is_bounded_in_bytes() {
        let store = Store::default();
        let quarter = "x".repeat(MAX_BYTES / 4);
        for id in ["a", "b", "c", "d"] {
            store.keep(id, Kept { previous: None, items: vec![json!(quarter)], response: json!({}) });
        }
        assert!(store.get("a").is_none() && store.get("b").is_some());
        let huge = Kept { previous: None, items: vec![json!("x".repeat(MAX_BYTES))], response: json!({}) };
        store.keep("huge", huge);
        assert!(store.get("huge").is_none() && store.get("d").is_some());
    }
}
