//! A radix tree over token ids that keeps something at exact lengths of its paths.
//!
//! It knows neither bytes nor devices: what an entry holds is the caller's. Paths exist only as far as entries
//! need them, so the tree's own memory is a few bytes per token of what it keeps.

use std::collections::{BTreeMap, HashMap};

/// An entry of a tree. It stays valid until the entry is removed, whatever is inserted beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EntryId(usize);

/// What a look-up found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Match {
    /// Leading tokens that agree with some path of the tree; at least the entry's length.
    pub shared: usize,
    /// The deepest entry on the way that was within the limit, and its length.
    pub entry: Option<(EntryId, usize)>,
}

#[derive(Debug)]
struct Node<T> {
    parent: usize,
    /// The tokens between the parent and here; empty at the root only.
    edge: Vec<u32>,
    /// By the first token of their edges.
    children: HashMap<u32, usize>,
    /// Tokens from the root to here.
    length: usize,
    entry: Option<Entry<T>>,
}

#[derive(Debug)]
struct Entry<T> {
    value: T,
    /// When it was last used.
    used: u64,
    holders: usize,
}

/// See the module's page.
#[derive(Debug)]
pub struct RadixTree<T> {
    nodes: Vec<Option<Node<T>>>,
    free: Vec<usize>,
    /// Entries that nobody holds, by last use.
    idle: BTreeMap<u64, usize>,
    clock: u64,
    entries: usize,
}

const ROOT: usize = 0;

impl<T> Default for RadixTree<T> {
    fn default() -> RadixTree<T> {
        let root = Node { parent: ROOT, edge: Vec::new(), children: HashMap::new(), length: 0, entry: None };
        RadixTree { nodes: vec![Some(root)], free: Vec::new(), idle: BTreeMap::new(), clock: 0, entries: 0 }
    }
}

impl<T> RadixTree<T> {
    /// Entries that it holds.
    pub fn len(&self) -> usize {
        self.entries
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.entries == 0
    }

    /// The deepest entry whose path is a prefix of `tokens` of at most `limit` tokens. It changes nothing.
    pub fn find(&self, tokens: &[u32], limit: usize) -> Match {
        let mut found = Match { shared: 0, entry: None };
        let mut at = ROOT;
        loop {
            let node = self.node(at);
            if node.entry.is_some() && node.length <= limit {
                found.entry = Some((EntryId(at), node.length));
            }
            let rest = &tokens[node.length..];
            let Some(&child) = rest.first().and_then(|first| node.children.get(first)) else { return found };
            let edge = &self.node(child).edge;
            found.shared += common_prefix(edge, rest);
            if found.shared < self.node(child).length {
                return found;
            }
            at = child;
        }
    }

    /// The entry at exactly `tokens`.
    pub fn at(&self, tokens: &[u32]) -> Option<EntryId> {
        let found = self.find(tokens, tokens.len()).entry;
        found.filter(|&(_, length)| length == tokens.len()).map(|(id, _)| id)
    }

    /// What an entry holds.
    pub fn value(&self, id: EntryId) -> Option<&T> {
        self.entry(id).map(|entry| &entry.value)
    }

    /// Keeps `value` at `tokens`, as the most recently used. Where something is kept there already, or where
    /// there are no tokens, `value` comes back.
    pub fn insert(&mut self, tokens: &[u32], value: T) -> Result<EntryId, T> {
        if tokens.is_empty() {
            return Err(value);
        }
        let at = self.path(tokens);
        if self.node(at).entry.is_some() {
            return Err(value);
        }
        let used = self.tick();
        self.node_mut(at).entry = Some(Entry { value, used, holders: 0 });
        self.idle.insert(used, at);
        self.entries += 1;
        Ok(EntryId(at))
    }

    /// Makes an entry the most recently used.
    pub fn touch(&mut self, id: EntryId) {
        let used = self.tick();
        if let Some(entry) = self.entry_mut(id) {
            let before = std::mem::replace(&mut entry.used, used);
            if self.idle.remove(&before).is_some() {
                self.idle.insert(used, id.0);
            }
        }
    }

    /// Keeps an entry from being the oldest until [`RadixTree::release`] was called as often.
    pub fn hold(&mut self, id: EntryId) {
        if let Some(entry) = self.entry_mut(id) {
            entry.holders += 1;
            let used = entry.used;
            self.idle.remove(&used);
        }
    }

    /// Undoes one [`RadixTree::hold`].
    pub fn release(&mut self, id: EntryId) {
        if let Some(entry) = self.entry_mut(id) {
            entry.holders = entry.holders.saturating_sub(1);
            if entry.holders == 0 {
                let used = entry.used;
                self.idle.insert(used, id.0);
            }
        }
    }

    /// The entry that was used least recently among those that nobody holds.
    pub fn oldest(&self) -> Option<EntryId> {
        self.idle.values().next().map(|&at| EntryId(at))
    }

    /// Takes an entry out. Deeper entries stay where they are.
    pub fn remove(&mut self, id: EntryId) -> Option<T> {
        let entry = self.nodes.get_mut(id.0)?.as_mut()?.entry.take()?;
        self.idle.remove(&entry.used);
        self.entries -= 1;
        self.prune(id.0);
        Some(entry.value)
    }

    /// Every entry with the tokens that lead to it, in no order.
    pub fn entries(&self) -> impl Iterator<Item = (EntryId, Vec<u32>, &T)> {
        self.nodes.iter().enumerate().filter_map(|(at, node)| {
            let entry = node.as_ref()?.entry.as_ref()?;
            Some((EntryId(at), self.tokens(at), &entry.value))
        })
    }

    fn tokens(&self, at: usize) -> Vec<u32> {
        let mut edges = Vec::new();
        let mut node = self.node(at);
        while node.length > 0 {
            edges.push(node.edge.as_slice());
            node = self.node(node.parent);
        }
        edges.into_iter().rev().flatten().copied().collect()
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Indices come from the tree itself, so the node is there.
    fn node(&self, at: usize) -> &Node<T> {
        self.nodes[at].as_ref().expect("nodes refer to nodes that exist")
    }

    fn node_mut(&mut self, at: usize) -> &mut Node<T> {
        self.nodes[at].as_mut().expect("nodes refer to nodes that exist")
    }

    fn entry(&self, id: EntryId) -> Option<&Entry<T>> {
        self.nodes.get(id.0)?.as_ref()?.entry.as_ref()
    }

    fn entry_mut(&mut self, id: EntryId) -> Option<&mut Entry<T>> {
        self.nodes.get_mut(id.0)?.as_mut()?.entry.as_mut()
    }

    fn add(&mut self, node: Node<T>) -> usize {
        match self.free.pop() {
            Some(at) => {
                self.nodes[at] = Some(node);
                at
            }
            None => {
                self.nodes.push(Some(node));
                self.nodes.len() - 1
            }
        }
    }

    /// The node at exactly `tokens`, made where there is none.
    fn path(&mut self, tokens: &[u32]) -> usize {
        let mut at = ROOT;
        loop {
            let length = self.node(at).length;
            let rest = &tokens[length..];
            let Some(&first) = rest.first() else { return at };
            let Some(&child) = self.node(at).children.get(&first) else {
                let leaf = Node {
                    parent: at,
                    edge: rest.to_vec(),
                    children: HashMap::new(),
                    length: tokens.len(),
                    entry: None,
                };
                let leaf = self.add(leaf);
                self.node_mut(at).children.insert(first, leaf);
                return leaf;
            };
            let agreed = common_prefix(&self.node(child).edge, rest);
            at = if agreed == self.node(child).edge.len() { child } else { self.split(child, agreed) };
        }
    }

    /// Puts a node `agreed` tokens into the edge that leads to `child`, which keeps its index.
    fn split(&mut self, child: usize, agreed: usize) -> usize {
        let lower = self.node_mut(child);
        let tail = lower.edge.split_off(agreed);
        let edge = std::mem::replace(&mut lower.edge, tail);
        let (parent, length) = (lower.parent, lower.length - lower.edge.len());
        let (first, below) = (edge[0], lower.edge[0]);
        let children = HashMap::from([(below, child)]);
        let middle = self.add(Node { parent, edge, children, length, entry: None });
        self.node_mut(child).parent = middle;
        self.node_mut(parent).children.insert(first, middle);
        middle
    }

    /// Removes what no entry needs: `at` where nothing is below it, then its parent likewise; a node with one
    /// child becomes part of that child's edge.
    fn prune(&mut self, mut at: usize) {
        while at != ROOT && self.node(at).entry.is_none() {
            let node = self.node(at);
            let (parent, first) = (node.parent, node.edge[0]);
            let only = node.children.values().next().copied().filter(|_| node.children.len() == 1);
            match only {
                None if node.children.is_empty() => {
                    self.node_mut(parent).children.remove(&first);
                    self.drop_node(at);
                    at = parent;
                }
                None => return,
                Some(child) => {
                    let mut edge = std::mem::take(&mut self.node_mut(at).edge);
                    let lower = self.node_mut(child);
                    edge.append(&mut lower.edge);
                    lower.edge = edge;
                    lower.parent = parent;
                    self.node_mut(parent).children.insert(first, child);
                    self.drop_node(at);
                    return;
                }
            }
        }
    }

    fn drop_node(&mut self, at: usize) {
        self.nodes[at] = None;
        self.free.push(at);
    }

    /// Says what is wrong with the tree's structure, for tests.
    pub fn check(&self) -> Result<(), String> {
        let mut entries = 0;
        for (at, node) in self.nodes.iter().enumerate() {
            let Some(node) = node else { continue };
            if at != ROOT {
                let parent = self.nodes[node.parent].as_ref().ok_or(format!("{at}: its parent is gone"))?;
                if parent.children.get(&node.edge[0]) != Some(&at) {
                    return Err(format!("{at}: its parent does not know it"));
                }
                if node.length != parent.length + node.edge.len() {
                    return Err(format!("{at}: {} is not its length", node.length));
                }
                if node.entry.is_none() && node.children.len() < 2 {
                    return Err(format!("{at}: nothing needs it"));
                }
            }
            if let Some(entry) = &node.entry {
                entries += 1;
                if (self.idle.get(&entry.used) == Some(&at)) != (entry.holders == 0) {
                    return Err(format!("{at}: {} holders and yet idle, or the reverse", entry.holders));
                }
            }
        }
        let idle = self.idle.values().filter(|&&at| self.entry(EntryId(at)).is_some()).count();
        if entries != self.entries || idle != self.idle.len() {
            return Err(format!("{entries} entries counted as {}; {idle} idle ones", self.entries));
        }
        Ok(())
    }
}

fn common_prefix(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}
