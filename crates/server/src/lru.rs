//! Values under ids within bounds, least recently used out first: what the stores of responses and of turns share.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// The values. Bounds are the owner's: see [`Lru::remove_oldest`].
#[derive(Debug)]
pub struct Lru<T> {
    kept: HashMap<String, Entry<T>>,
    /// Ids by their last use.
    used: BTreeMap<u64, String>,
    clock: u64,
    bytes: usize,
}

#[derive(Debug)]
struct Entry<T> {
    value: Arc<T>,
    bytes: usize,
    used: u64,
}

impl<T> Default for Lru<T> {
    fn default() -> Lru<T> {
        Lru { kept: HashMap::new(), used: BTreeMap::new(), clock: 0, bytes: 0 }
    }
}

impl<T> Lru<T> {
    /// Keeps `value`, which counts as `bytes`, in the place of what was kept under `id`.
    pub fn insert(&mut self, id: &str, value: T, bytes: usize) {
        self.remove(id);
        self.clock += 1;
        self.used.insert(self.clock, id.to_string());
        self.kept.insert(id.to_string(), Entry { value: Arc::new(value), bytes, used: self.clock });
        self.bytes += bytes;
    }

    /// The value under `id`, whose use this is.
    pub fn get(&mut self, id: &str) -> Option<Arc<T>> {
        let entry = self.kept.get_mut(id)?;
        self.used.remove(&entry.used);
        self.clock += 1;
        entry.used = self.clock;
        self.used.insert(self.clock, id.to_string());
        Some(Arc::clone(&entry.value))
    }

    /// Forgets the value under `id`; whether there was one.
    pub fn remove(&mut self, id: &str) -> bool {
        let Some(entry) = self.kept.remove(id) else { return false };
        self.used.remove(&entry.used);
        self.bytes -= entry.bytes;
        true
    }

    /// Forgets the value that has not been used for the longest time.
    pub fn remove_oldest(&mut self) {
        if let Some(id) = self.used.first_key_value().map(|(_, id)| id.clone()) {
            self.remove(&id);
        }
    }

    /// All values, in no order.
    pub fn values(&self) -> impl Iterator<Item = &T> {
        self.kept.values().map(|entry| &*entry.value)
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        self.kept.len()
    }

    /// Bytes of all values.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}
