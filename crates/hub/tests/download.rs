//! Files come whole over lines that break, and nothing is fetched twice.

#[path = "support/fake_hub.rs"]
mod fake_hub;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use fake_hub::{COMMIT, FakeHub, Fault};
use lily_hub::{Event, Hub, HubError, Patience, Repo, Settings};

const REPO: &str = "someone/model";
/// Files from this size on lie behind a redirect.
const LARGE: usize = 100_000;
const WEIGHTS: &str = "model.safetensors";
const CONFIG: &str = "config.json";

/// Bytes that differ everywhere.
fn weights() -> Vec<u8> {
    (0..300_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
}

fn fake() -> FakeHub {
    FakeHub::start(REPO, &[(CONFIG, b"{}"), (WEIGHTS, &weights()), ("README.md", b"words")], LARGE)
}

/// A cache, and a hub before it.
struct Place {
    root: tempfile::TempDir,
    endpoint: String,
    token: Option<String>,
    offline: bool,
    patience: Patience,
    said: Mutex<Vec<String>>,
}

impl Place {
    fn new(fake: &FakeHub) -> Place {
        Place {
            root: tempfile::tempdir().unwrap(),
            endpoint: fake.endpoint(),
            token: None,
            offline: false,
            patience: Patience {
                retries: 2,
                wait: Duration::from_millis(1),
                silence: Duration::from_secs(30),
            },
            said: Mutex::default(),
        }
    }

    fn hub(&self) -> Hub {
        let settings = Settings {
            endpoint: self.endpoint.clone(),
            token: self.token.clone(),
            cache: self.root.path().to_owned(),
            offline: self.offline,
        };
        Hub::new(settings, self.patience, 3)
    }

    /// Fetches config and weights.
    fn pull(&self) -> Result<PathBuf, HubError> {
        let (hub, repo): (_, Repo) = (self.hub(), REPO.parse().unwrap());
        let listen = |event: Event<'_>| match event {
            Event::Fetched(_) => {}
            other => self.said.lock().unwrap().push(format!("{other:?}")),
        };
        let listing = hub.list(&repo, self.patience, &listen)?;
        let dir = hub.fetch(&repo, &listing, &[CONFIG.to_owned(), WEIGHTS.to_owned()], &listen)?;
        hub.finish(&repo, &listing)?;
        Ok(dir)
    }

    fn incomplete(&self, fake: &FakeHub) -> PathBuf {
        self.hub().cache(&REPO.parse().unwrap()).incomplete(&fake.etag(WEIGHTS))
    }

    fn said(&self) -> String {
        self.said.lock().unwrap().join("\n")
    }
}

fn assert_whole(dir: &Path) {
    assert_eq!(fs::read(dir.join(CONFIG)).unwrap(), b"{}");
    assert!(fs::read(dir.join(WEIGHTS)).unwrap() == weights(), "the weights have other bytes");
}

#[test]
fn what_is_wanted_comes_into_the_cache_of_hugging_face_tools_and_comes_once() {
    let fake = fake();
    let place = Place::new(&fake);
    let dir = place.pull().unwrap();
    assert_whole(&dir);
    let repo = place.root.path().join("models--someone--model");
    assert_eq!(dir, repo.join("snapshots").join(COMMIT));
    assert_eq!(fs::read_to_string(repo.join("refs/main")).unwrap(), COMMIT);
    assert!(fs::symlink_metadata(dir.join(WEIGHTS)).unwrap().is_symlink() || cfg!(not(unix)));
    assert!(repo.join("blobs").join(fake.etag(WEIGHTS)).is_file());
    assert!(!dir.join("README.md").exists());
    assert_eq!(fake.asked(WEIGHTS), [0]);

    assert_whole(&place.pull().unwrap());
    assert_eq!((fake.asked(WEIGHTS), fake.asked(CONFIG)), (vec![], vec![0]));
    let found = place.hub().cache(&REPO.parse().unwrap()).snapshot_of(&REPO.parse().unwrap());
    assert_eq!(found, Some(dir));
}

#[test]
fn files_come_at_the_same_time() {
    let fake = fake();
    let place = Place::new(&fake);
    // The first does not come before the second was asked for.
    fake.fail(WEIGHTS, &[Fault::After(CONFIG)]);
    assert_whole(&place.pull().unwrap());
    assert!(!place.said().contains("Again"), "{}", place.said());
}

#[test]
fn a_line_that_breaks_costs_no_byte_and_a_line_that_only_breaks_is_told() {
    let fake = fake();
    let place = Place::new(&fake);
    // More breaks than retries: each brought something.
    fake.fail(WEIGHTS, &[Fault::Break(70_000); 4]);
    assert_whole(&place.pull().unwrap());
    assert_eq!(fake.asked(WEIGHTS), [0, 70_000, 140_000, 210_000, 280_000]);
    assert_eq!(place.said().matches("Again").count(), 4);

    let place = Place::new(&fake);
    fake.fail(WEIGHTS, &[Fault::Break(70_000), Fault::Break(0), Fault::Status(503, None)]);
    let error = place.pull().unwrap_err();
    assert!(matches!(error, HubError::Lost { here: 70_000, of: 300_000, attempts: 2, .. }), "{error:?}");
    assert!(error.to_string().contains("70.0 kB of 300.0 kB of model.safetensors"), "{error}");
    assert!(error.to_string().contains("run the same command again"), "{error}");
    fake.asked(WEIGHTS);
    assert_whole(&place.pull().unwrap());
    assert_eq!(fake.asked(WEIGHTS), [70_000]);
}

#[test]
fn a_line_that_goes_dead_is_noticed() {
    let fake = fake();
    let mut place = Place::new(&fake);
    place.patience.silence = Duration::from_millis(300);
    // On a busy machine a line that is well may be silent for so long too.
    place.patience.retries = 50;
    fake.fail(WEIGHTS, &[Fault::Hang(70_000); 2]);
    assert_whole(&place.pull().unwrap());
    let asked = fake.asked(WEIGHTS);
    assert!(asked.len() > 2 && asked[0] == 0 && asked.is_sorted(), "{asked:?}");
    assert!((1..=140_000).contains(&asked[asked.len() - 1]), "{asked:?}");
}

#[test]
fn a_server_that_ignores_ranges_costs_time_and_no_harm() {
    let fake = fake();
    let place = Place::new(&fake);
    fake.fail(WEIGHTS, &[Fault::Break(70_000), Fault::IgnoreRange]);
    assert_whole(&place.pull().unwrap());
    assert_eq!(fake.asked(WEIGHTS), [0, 70_000]);
}

#[test]
fn a_wrong_byte_is_found_and_the_file_comes_again() {
    let fake = fake();
    for (name, at) in [(WEIGHTS, 123_456), (CONFIG, 1)] {
        let place = Place::new(&fake);
        fake.fail(name, &[Fault::WrongByte(at)]);
        assert_whole(&place.pull().unwrap());
        assert!(place.said().contains("Wrong"), "{}", place.said());
        fake.asked(name);
    }

    let place = Place::new(&fake);
    fake.fail(WEIGHTS, &[Fault::WrongByte(1); 2]);
    let error = place.pull().unwrap_err();
    assert!(matches!(&error, HubError::Wrong { file, .. } if file == WEIGHTS), "{error:?}");
    assert!(!place.incomplete(&fake).exists());
    // Also one that was wrong on the disk before.
    let mut begun = weights()[..200_000].to_vec();
    begun[7] ^= 1;
    fs::write(place.incomplete(&fake), begun).unwrap();
    assert_whole(&place.pull().unwrap());
}

#[test]
fn a_disk_that_is_too_small_is_told_before_the_first_byte() {
    let fake = fake();
    fake.list_size(WEIGHTS, 1 << 60);
    let place = Place::new(&fake);
    let error = place.pull().unwrap_err();
    assert!(matches!(error, HubError::TooSmall { needed, .. } if needed == (1 << 60) + 2), "{error:?}");
    assert!(error.to_string().contains("HF_HOME"), "{error}");
    assert_eq!((fake.asked(WEIGHTS), fake.asked(CONFIG)), (vec![], vec![]));
}

#[test]
fn who_may_not_read_is_told_what_to_do_and_the_token_goes_to_the_hub_alone() {
    let fake = fake();
    fake.require_token("hf_right");
    let mut place = Place::new(&fake);
    let error = place.pull().unwrap_err();
    assert!(matches!(error, HubError::Denied { status: 401, with_token: false, .. }), "{error:?}");
    assert!(error.to_string().contains("set HF_TOKEN"), "{error}");
    place.token = Some("hf_wrong".to_owned());
    let error = place.pull().unwrap_err();
    assert!(error.to_string().contains("the token in use may not"), "{error}");
    assert!(!error.to_string().contains("hf_wrong"), "{error}");
    place.token = Some("hf_right".to_owned());
    assert_whole(&place.pull().unwrap());
    assert!(!fake.leaked());
}

#[test]
fn what_is_not_there_is_named() {
    let fake = fake();
    let place = Place::new(&fake);
    let (hub, repo): (_, Repo) = (place.hub(), "someone/other@v2".parse().unwrap());
    let error = hub.list(&repo, place.patience, &|_| {}).unwrap_err();
    assert!(matches!(error, HubError::NotFound { .. }), "{error:?}");
    assert!(error.to_string().contains("someone/other@v2"), "{error}");
}

#[test]
fn a_hub_that_is_busy_is_left_alone_as_long_as_it_asks() {
    let fake = fake();
    let place = Place::new(&fake);
    fake.fail_list(&[Fault::Status(429, Some(1))]);
    assert_whole(&place.pull().unwrap());
    assert!(place.said().contains("wait: 1s"), "{}", place.said());

    fake.fail_list(&[Fault::Status(429, Some(3600))]);
    let error = place.pull().unwrap_err();
    assert!(matches!(error, HubError::Busy { wait: Some(_), .. }), "{error:?}");
    fake.fail_list(&[Fault::Status(503, Some(3600))]);
    assert!(matches!(place.pull().unwrap_err(), HubError::Busy { .. }));
    assert!(error.to_string().contains("asks to wait 3600 s"), "{error}");
}

#[test]
fn sizes_and_hashes_that_the_list_lacks_are_asked_for() {
    let fake = fake();
    fake.leave_out_sizes();
    let place = Place::new(&fake);
    fake.fail(WEIGHTS, &[Fault::WrongByte(9)]);
    assert_whole(&place.pull().unwrap());
    assert!(place.said().contains("Wrong"), "{}", place.said());
    let blobs = place.root.path().join("models--someone--model/blobs");
    assert!(blobs.join(fake.etag(WEIGHTS)).is_file() && blobs.join(fake.etag(CONFIG)).is_file());
}

#[test]
fn offline_nobody_is_asked() {
    let fake = fake();
    let mut place = Place::new(&fake);
    place.offline = true;
    assert!(matches!(place.pull().unwrap_err(), HubError::Offline { .. }));
    assert_eq!(fake.requests(), 0);
}

#[test]
fn programs_that_fetch_the_same_at_once_share_one_download() {
    let fake = fake();
    let place = Place::new(&fake);
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..8).map(|_| scope.spawn(|| place.pull())).collect();
        for one in all {
            assert_whole(&one.join().unwrap().unwrap());
        }
    });
    assert_eq!(fake.asked(WEIGHTS), [0]);
}
