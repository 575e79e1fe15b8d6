//! What the radix tree promises, alone and against a plain list of what was put in.

use std::collections::HashMap;

use lily_engine::prefix_cache::positions::{TurnMarkers, positions};
use lily_engine::prefix_cache::tree::{EntryId, Match, RadixTree};
use proptest::prelude::*;

fn found(tree: &RadixTree<&'static str>, tokens: &[u32], limit: usize) -> (usize, Option<&'static str>) {
    let Match { shared, entry } = tree.find(tokens, limit);
    (shared, entry.map(|(id, _)| *tree.value(id).unwrap()))
}

#[test]
fn the_deepest_entry_on_the_way_is_found_and_how_far_the_way_goes() {
    let mut tree = RadixTree::default();
    for (tokens, value) in [(&[1, 2, 3, 4][..], "long"), (&[1, 2], "short"), (&[1, 2, 9], "branch")] {
        tree.insert(tokens, value).unwrap();
    }
    assert_eq!(found(&tree, &[1, 2, 3, 4, 5], usize::MAX), (4, Some("long")));
    assert_eq!(found(&tree, &[1, 2, 3, 4], 3), (4, Some("short")), "strictly shorter than the prompt");
    assert_eq!(found(&tree, &[1, 2, 3, 7], usize::MAX), (3, Some("short")));
    assert_eq!(found(&tree, &[1, 2, 9, 9], usize::MAX), (3, Some("branch")));
    assert_eq!(found(&tree, &[1], usize::MAX), (1, None));
    assert_eq!(found(&tree, &[2], usize::MAX), (0, None));
    assert_eq!(tree.insert(&[1, 2], "again"), Err("again"));
    assert_eq!(tree.insert(&[], "nowhere"), Err("nowhere"));
}

#[test]
fn an_inner_entry_goes_without_the_deeper_ones() {
    let mut tree = RadixTree::default();
    let inner = tree.insert(&[1, 2], "inner").unwrap();
    tree.insert(&[1, 2, 3], "outer").unwrap();
    assert_eq!(tree.oldest(), Some(inner));
    assert_eq!(tree.remove(inner), Some("inner"));
    assert_eq!(found(&tree, &[1, 2, 3, 4], usize::MAX), (3, Some("outer")));
    assert_eq!(found(&tree, &[1, 2, 4], usize::MAX), (2, None));
    tree.check().unwrap();
}

#[test]
fn what_is_held_is_never_the_oldest() {
    let mut tree = RadixTree::default();
    let [first, second] = [[1], [2]].map(|tokens| tree.insert(&tokens, "").unwrap());
    tree.hold(first);
    tree.hold(first);
    assert_eq!(tree.oldest(), Some(second));
    tree.hold(second);
    assert_eq!(tree.oldest(), None);
    tree.release(first);
    assert_eq!(tree.oldest(), None);
    tree.release(first);
    assert_eq!(tree.oldest(), Some(first));
    tree.release(second);
    tree.touch(first);
    assert_eq!(tree.oldest(), Some(second));
}

/// System, question, call, result, call, result, and the answer about to begin; a turn is its start, its role
/// (10 user, 11 model, 12 system), a tool's mark where there is one, and text.
#[test]
fn snapshots_stand_where_the_next_prompt_may_part_from_this_one() {
    let markers = TurnMarkers { turn_start: 1, tool_response: Some(2) };
    let turns: [&[u32]; 7] = [
        &[1, 12, 50, 50],
        &[1, 10, 60, 60],
        &[1, 11, 70],
        &[1, 10, 3, 2, 80],
        &[1, 11, 71],
        &[1, 10, 3, 2, 81],
        &[1, 11],
    ];
    let prompt = turns.concat();
    assert_eq!(positions(&prompt, Some(&markers), 4096), [4, 8, 19, 24]);
    assert_eq!(positions(&prompt, Some(&markers), 10), [4, 8, 10, 19, 20, 24]);
    assert_eq!(positions(&prompt, None, 4096), [25], "text without turns: the same again is cheap");
    assert_eq!(positions(&[1, 11], Some(&markers), 4096), [0usize; 0]);
    assert_eq!(positions(&[7], None, 4096), [0usize; 0]);
}

/// The tree against a list: what is found, in which order things leave, what is held.
#[derive(Default)]
struct Plain {
    /// Tokens to (value, last use, holders).
    entries: HashMap<Vec<u32>, (u32, u64, usize)>,
    clock: u64,
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_tree_agrees_with_a_plain_list(
        // Few tokens and short paths, so that they meet.
        operations in proptest::collection::vec((0u8..6, proptest::collection::vec(0u32..3, 0..7), 0usize..8), 50)
    ) {
        let mut tree = RadixTree::default();
        let mut plain = Plain::default();
        let mut ids: HashMap<Vec<u32>, EntryId> = HashMap::new();
        for (value, (operation, tokens, limit)) in operations.into_iter().enumerate() {
            let value = value as u32;
            plain.clock += 1;
            let clock = plain.clock;
            let known = ids.get(&tokens).copied();
            prop_assert_eq!(tree.at(&tokens), known);
            match operation {
                0 | 1 => match tree.insert(&tokens, value) {
                    Ok(id) => {
                        prop_assert!(plain.entries.insert(tokens.clone(), (value, clock, 0)).is_none());
                        ids.insert(tokens.clone(), id);
                    }
                    Err(back) => {
                        prop_assert_eq!(back, value);
                        prop_assert!(tokens.is_empty() || plain.entries.contains_key(&tokens));
                    }
                },
                2 => if let Some(id) = known {
                    tree.touch(id);
                    plain.entries.get_mut(&tokens).unwrap().1 = clock;
                },
                3 => if let Some(id) = known {
                    tree.hold(id);
                    plain.entries.get_mut(&tokens).unwrap().2 += 1;
                },
                4 => if let Some(id) = known && plain.entries[&tokens].2 > 0 {
                    tree.release(id);
                    plain.entries.get_mut(&tokens).unwrap().2 -= 1;
                },
                _ => {
                    let oldest = plain.entries.iter().filter(|(_, entry)| entry.2 == 0);
                    let oldest = oldest.min_by_key(|(_, entry)| entry.1).map(|(tokens, _)| tokens.clone());
                    prop_assert_eq!(tree.oldest(), oldest.as_ref().map(|tokens| ids[tokens]));
                    if let Some(oldest) = oldest {
                        let value = tree.remove(ids.remove(&oldest).unwrap());
                        prop_assert_eq!(value, plain.entries.remove(&oldest).map(|entry| entry.0));
                    }
                }
            }
            let on_the_way = |entry: &&Vec<u32>| tokens.starts_with(entry) && entry.len() <= limit;
            let deepest = plain.entries.keys().filter(on_the_way).max_by_key(|entry| entry.len());
            let agreement = |entry: &Vec<u32>| entry.iter().zip(&tokens).take_while(|(a, b)| a == b).count();
            let expected = Match {
                shared: plain.entries.keys().map(agreement).max().unwrap_or(0),
                entry: deepest.map(|entry| (ids[entry], entry.len())),
            };
            prop_assert_eq!(tree.find(&tokens, limit), expected);
            prop_assert_eq!(tree.len(), plain.entries.len());
            prop_assert_eq!(tree.check(), Ok(()));
        }
        let listed: HashMap<Vec<u32>, u32> = tree.entries().map(|(_, tokens, value)| (tokens, *value)).collect();
        let expected: HashMap<Vec<u32>, u32> = plain.entries.into_iter().map(|(t, e)| (t, e.0)).collect();
        prop_assert_eq!(listed, expected);
    }
}
