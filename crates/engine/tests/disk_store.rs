//! What the directory of records promises, whatever is in it.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use lily_engine::backend::Export;
use lily_engine::prefix_cache::disk::{DiskOptions, Store};
use tempfile::TempDir;

const LAYOUT: &str = "a toy's layout";

fn options(dir: &Path, bytes: u64) -> DiskOptions {
    DiskOptions { dir: dir.to_owned(), bytes, model: "a model".to_owned() }
}

fn open(dir: &Path) -> Store {
    Store::open(&options(dir, u64::MAX), LAYOUT).unwrap()
}

fn export(state: &[u8]) -> Export {
    let state = state.to_vec();
    Box::new(move |out| out.write_all(&state))
}

/// The state of the longest record of `tokens`.
fn load(store: &Store, tokens: &[u32]) -> Option<Vec<u8>> {
    store.load(store.find(tokens, 1)?, tokens)
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

#[test]
fn the_longest_record_that_a_prompt_begins_with_is_found_also_by_the_next_process() {
    let dir = TempDir::new().unwrap();
    let store = open(dir.path());
    for (tokens, state) in [(&[1, 2][..], b"short"), (&[1, 2, 3, 4], b"longr"), (&[9], b"other")] {
        assert!(store.save(tokens, 100, export(state)).unwrap());
    }
    for store in [store, open(dir.path())] {
        assert_eq!(load(&store, &[1, 2, 3, 4, 5]).unwrap(), b"longr");
        assert_eq!(load(&store, &[1, 2, 3, 4]).unwrap(), b"short", "one token is to be left");
        assert_eq!(load(&store, &[1, 2, 7]).unwrap(), b"short");
        assert_eq!(store.find(&[1, 2, 7], 3), None);
        assert_eq!(load(&store, &[2, 2, 7]), None);
        assert!(store.at(&[9]).is_some() && store.at(&[1]).is_none());
        assert!(!store.save(&[9], 100, export(b"again")).unwrap());
    }
}

#[test]
fn records_of_other_models_layouts_and_strangers_are_left_alone() {
    let dir = TempDir::new().unwrap();
    assert!(open(dir.path()).save(&[1, 2], 10, export(b"state")).unwrap());
    let other_model = DiskOptions { model: "another".to_owned(), ..options(dir.path(), u64::MAX) };
    for store in [
        Store::open(&other_model, LAYOUT).unwrap(),
        Store::open(&options(dir.path(), u64::MAX), "another layout").unwrap(),
    ] {
        assert_eq!(load(&store, &[1, 2, 3]), None);
    }
    for name in ["notes.txt", ".lily", "a-b-c.lily", "0-18446744073709551616-0.lily", "--.lily", "é.lily"] {
        fs::write(dir.path().join(name), "not a record").unwrap();
    }
    fs::create_dir(dir.path().join("folder.lily")).unwrap();
    let before = files(dir.path());
    assert_eq!(load(&open(dir.path()), &[1, 2, 3]).unwrap(), b"state");
    assert_eq!(files(dir.path()), before);
}

#[test]
fn a_record_with_any_byte_changed_or_missing_is_removed_and_never_used() {
    let dir = TempDir::new().unwrap();
    assert!(open(dir.path()).save(&[1, 2, 3], 10, export(b"the state of a toy")).unwrap());
    let path = files(dir.path()).remove(0);
    let whole = fs::read(&path).unwrap();
    let mut wrong: Vec<Vec<u8>> = (0..whole.len()).map(|length| whole[..length].to_vec()).collect();
    wrong.push([&whole[..], &[0]].concat());
    for at in 0..whole.len() {
        let mut changed = whole.clone();
        changed[at] ^= 1 << (at % 8);
        wrong.push(changed);
    }
    // Sizes that promise more than there is.
    for at in 0..whole.len() - 8 {
        let mut huge = whole.clone();
        huge[at..at + 8].fill(0xff);
        wrong.push(huge);
    }
    for bytes in wrong {
        fs::write(&path, &bytes).unwrap();
        assert_eq!(load(&open(dir.path()), &[1, 2, 3, 4]), None, "{} bytes", bytes.len());
        assert_eq!(files(dir.path()), [] as [PathBuf; 0]);
    }
    fs::write(&path, &whole).unwrap();
    assert_eq!(load(&open(dir.path()), &[1, 2, 3, 4]).unwrap(), b"the state of a toy");
}

/// A record under the name of another: both are whole, and only one is what its name says.
#[test]
fn a_record_is_compared_with_the_prompt_token_by_token() {
    let dir = TempDir::new().unwrap();
    let store = open(dir.path());
    store.save(&[1, 2, 3], 10, export(b"one")).unwrap();
    let one = files(dir.path()).remove(0);
    store.save(&[4, 5, 6], 10, export(b"two")).unwrap();
    let two = files(dir.path()).into_iter().find(|path| *path != one).unwrap();
    fs::copy(&one, &two).unwrap();
    assert_eq!(load(&store, &[4, 5, 6, 7]), None);
    assert_eq!(load(&store, &[1, 2, 3, 7]).unwrap(), b"one");
}

#[test]
fn the_budget_holds_and_what_was_used_longest_ago_goes_first() {
    let dir = TempDir::new().unwrap();
    let state = [7; 1000];
    let store = Store::open(&options(dir.path(), 4000), LAYOUT).unwrap();
    for first in 1..=3 {
        assert!(store.save(&[first, 0], 1200, export(&state)).unwrap());
        // Modification times are what counts; make them differ on any file system.
        let age = Duration::from_secs(100 - u64::from(first));
        let newest =
            files(dir.path()).into_iter().max_by_key(|path| path.metadata().unwrap().modified().unwrap());
        File::options()
            .write(true)
            .open(newest.unwrap())
            .unwrap()
            .set_modified(SystemTime::now() - age)
            .unwrap();
    }
    // The two oldest are used, so that the third becomes the oldest.
    assert!(load(&store, &[1, 0, 0]).is_some());
    store.touch(store.at(&[2, 0]).unwrap());
    assert!(store.save(&[4, 0], 1200, export(&state)).unwrap());
    assert_eq!([1, 2, 3, 4].map(|first| store.at(&[first, 0]).is_some()), [true, true, false, true]);
    let sum: u64 = files(dir.path()).iter().map(|path| path.metadata().unwrap().len()).sum();
    assert!(sum <= 4000, "{sum} bytes");
    assert!(!store.save(&[5, 0], 4001, export(&state)).unwrap(), "larger than the budget");
    assert!(store.at(&[4, 0]).is_some());
}

#[test]
fn what_another_server_removes_is_missing_and_no_error() {
    let dir = TempDir::new().unwrap();
    let (ours, theirs) = (open(dir.path()), open(dir.path()));
    ours.save(&[1, 2], 10, export(b"state")).unwrap();
    let theirs_later = open(dir.path());
    assert_eq!(load(&theirs, &[1, 2, 3]), None, "it was not there when they looked");
    assert!(load(&theirs_later, &[1, 2, 3]).is_some());
    files(dir.path()).into_iter().for_each(|path| fs::remove_file(path).unwrap());
    assert_eq!(load(&ours, &[1, 2, 3]), None);
    assert_eq!(ours.at(&[1, 2]), None, "forgotten, so that it can be written again");
    assert!(ours.save(&[1, 2], 10, export(b"state")).unwrap());
}

#[test]
fn servers_that_share_a_small_directory_read_what_was_written_or_nothing() {
    const RECORDS: u32 = 12;
    let dir = TempDir::new().unwrap();
    let state = |first: u32| vec![first as u8; 2000];
    let serve = |server: u32| {
        let store = Store::open(&options(dir.path(), 10_000), LAYOUT).unwrap();
        let mut found = 0;
        for round in 0..100 {
            let first = (round * 7 + server * 5) % RECORDS;
            store.save(&[first, 0], 2200, export(&state(first))).unwrap();
            for first in 0..RECORDS {
                if let Some(loaded) = load(&store, &[first, 0, 0]) {
                    assert!(loaded == state(first));
                    found += 1;
                }
            }
        }
        found
    };
    let found = std::thread::scope(|scope| {
        let servers: Vec<_> = (0..4).map(|server| scope.spawn(move || serve(server))).collect();
        servers.into_iter().map(|server| server.join().unwrap()).sum::<usize>()
    });
    assert!(found > 0);
    assert!(files(dir.path()).iter().all(|path| path.extension().is_some_and(|suffix| suffix == "lily")));
}

#[test]
fn temporary_files_of_the_dead_are_removed_and_those_of_the_living_are_not() {
    let dir = TempDir::new().unwrap();
    let (dead, living) = (dir.path().join("1-2-3.tmp"), dir.path().join("4-5-6.tmp"));
    fs::write(&dead, "half a record").unwrap();
    let file = File::create(&living).unwrap();
    file.lock().unwrap();
    open(dir.path());
    assert_eq!(files(dir.path()), [living]);
}

#[test]
fn a_write_that_fails_leaves_nothing_behind() {
    let dir = TempDir::new().unwrap();
    let store = open(dir.path());
    let broken: Export = Box::new(|out: &mut dyn Write| {
        out.write_all(&[1; 100])?;
        Err(std::io::Error::other("a test"))
    });
    assert!(store.save(&[1, 2], 10, broken).is_err());
    assert_eq!(files(dir.path()), [] as [PathBuf; 0]);
    assert_eq!(store.at(&[1, 2]), None);
}

#[cfg(unix)]
#[test]
fn what_is_no_plain_file_is_not_opened() {
    let dir = TempDir::new().unwrap();
    let store = open(dir.path());
    store.save(&[1, 2], 10, export(b"state")).unwrap();
    let record = files(dir.path()).remove(0);
    let elsewhere = dir.path().join("elsewhere");
    fs::rename(&record, &elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, &record).unwrap();
    assert_eq!(load(&store, &[1, 2, 3]), None);
    assert_eq!(load(&open(dir.path()), &[1, 2, 3]), None);
}
