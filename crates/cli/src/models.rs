//! Where models are: in a directory, or in a repository of the hub, whose files are in the cache or come into it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, bail};
use indicatif::DecimalBytes;
use lily_hub::{Event, Hub, HubError, Patience, Repo, Settings};
use lily_model::checkpoint::{
    CONFIG_FILE, Checkpoint, GENERATION_FILE, TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE,
};
use lily_model::config::parse_config_text;
use lily_model::safetensors::{INDEX_FILE, SINGLE_FILE};
use lily_model::source::Source;
use serde::Deserialize;

use crate::progress::Download;

/// The model that Lily is for.
pub const DEFAULT: &str = "mlx-community/Qwen3.6-35B-A3B-4bit";
/// Files that come at once where nothing is said: the weights are in four.
pub const JOBS: usize = 4;
/// How often a request that brought nothing is made again where nothing is said: for two minutes.
pub const RETRIES: u32 = 6;

/// The files that are read beside the weights; what else a repository has is left there.
const TEXT_FILES: [&str; 6] =
    [CONFIG_FILE, INDEX_FILE, TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, TEMPLATE_FILE, GENERATION_FILE];

/// A checkpoint's files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// What the model is called: a repository's name without its owner, `None` for the directory's.
    pub name: Option<String>,
    /// The directory that they are in.
    pub dir: PathBuf,
}

/// The checkpoint that `path` names: a directory, else a repository. Its files are fetched where they are not here; where
/// they are, nobody is asked whether there are newer ones.
///
/// # Errors
/// Those of [`pull`].
pub fn find(path: &Path) -> anyhow::Result<Found> {
    let Some(repo) = repository(path) else { return Ok(Found { name: None, dir: path.to_owned() }) };
    let name = repo.name().split_once('/').map(|(_, name)| name.to_owned());
    if let Some(dir) = here(&repo)? {
        return Ok(Found { name, dir });
    }
    let patience = Patience { retries: RETRIES, ..Patience::default() };
    // A directory's name may be mistyped: that is not worth a minute of waiting for the hub.
    let asking = Patience { retries: 1, ..patience };
    let dir = pull(&repo, asking, patience, JOBS)
        .with_context(|| format!("there is no directory {}, and as a repository", path.display()))?;
    Ok(Found { name, dir })
}

/// Opens the checkpoint that `path` names, as [`find`] does.
///
/// # Errors
/// Those of [`find`], and a checkpoint that cannot be loaded.
pub fn open(path: &Path) -> anyhow::Result<Checkpoint> {
    let Found { name, dir } = find(path)?;
    let opened = match name {
        Some(name) => Source::directory(&dir).and_then(|source| Checkpoint::from_source(name, source)),
        None => Checkpoint::open(&dir),
    };
    opened.with_context(|| format!("{} cannot be loaded", path.display()))
}

/// The repository that `path` names, where it names no file or directory.
pub fn repository(path: &Path) -> Option<Repo> {
    if path.exists() { None } else { path.to_str()?.parse().ok() }
}

/// The directory of a repository's files, where they are all here.
///
/// # Errors
/// Settings that cannot be.
pub fn here(repo: &Repo) -> anyhow::Result<Option<PathBuf>> {
    let hub = Hub::new(Settings::from_env()?, Patience::default(), JOBS);
    Ok(whole(&hub, repo))
}

fn whole(hub: &Hub, repo: &Repo) -> Option<PathBuf> {
    // Reads the headers of all files of weights, so one that is missing or cut off is noticed.
    hub.cache(repo)
        .snapshot_of(repo)
        .filter(|dir| Checkpoint::open(dir).is_ok() && dir.join(TOKENIZER_FILE).is_file())
}

/// Fetches what is not here yet of the files that Lily reads of `repo`, `jobs` of them at once, and gives the directory
/// that they are in. Says on standard error how far it is. `asking` is the patience until the hub has said what there is.
///
/// # Errors
/// Those of [`HubError`], each with what to do; a repository whose model Lily does not run, before its weights are fetched.
pub fn pull(repo: &Repo, asking: Patience, patience: Patience, jobs: usize) -> anyhow::Result<PathBuf> {
    let hub = Hub::new(Settings::from_env()?, patience, jobs);
    let teller = Teller::default();
    let tell = |event: Event<'_>| teller.tell(event);
    let listing = match hub.list(repo, asking, &tell) {
        Ok(listing) => listing,
        Err(error) => return without_the_hub(&hub, repo, error),
    };
    let has = |name: &str| listing.files.iter().any(|file| file.name == name);
    if !has(CONFIG_FILE) {
        bail!(
            "{repo} holds no checkpoint ({CONFIG_FILE} is missing); name a repository of an MLX 4-bit checkpoint"
        );
    }
    let texts: Vec<String> = TEXT_FILES.iter().filter(|name| has(name)).map(ToString::to_string).collect();
    let dir = teller.clear(hub.fetch(repo, &listing, &texts, &tell))?;
    let weights = weight_files(&dir).with_context(|| format!("Lily does not run {repo}"))?;
    if let Some(missing) = weights.iter().find(|name| !has(name)) {
        bail!("{repo} lacks {missing}; name a repository that is whole");
    }
    let weights: Vec<String> = weights.into_iter().collect();
    eprintln!("lily: {repo} into {}", dir.display());
    let dir = teller.clear(hub.fetch(repo, &listing, &weights, &tell))?;
    hub.finish(repo, &listing)?;
    Ok(dir)
}

/// The files of weights that belong to the [`TEXT_FILES`] in `dir`; an error where the model is none that Lily runs.
fn weight_files(dir: &Path) -> anyhow::Result<BTreeSet<String>> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let source = Source::directory(dir)?;
    parse_config_text(&source.require(CONFIG_FILE)?)?;
    match source.open(INDEX_FILE)? {
        Some(index) => {
            let index: Index =
                serde_json::from_slice(&index).with_context(|| format!("{INDEX_FILE} is damaged"))?;
            Ok(index.weight_map.into_values().collect())
        }
        None => Ok(BTreeSet::from([SINGLE_FILE.to_owned()])),
    }
}

/// What is here, where the hub does not say what it should be.
fn without_the_hub(hub: &Hub, repo: &Repo, error: HubError) -> anyhow::Result<PathBuf> {
    let silent =
        matches!(error, HubError::Unreachable { .. } | HubError::Busy { .. } | HubError::Offline { .. });
    match whole(hub, repo).filter(|_| silent) {
        Some(dir) => {
            eprintln!("lily: nobody was asked whether there is a newer {repo}; what is here is whole");
            Ok(dir)
        }
        None => Err(error.into()),
    }
}

/// Shows what happens.
#[derive(Default)]
struct Teller {
    download: Mutex<Option<Download>>,
}

impl Teller {
    fn tell(&self, event: Event<'_>) {
        let mut download = self.download.lock().unwrap_or_else(PoisonError::into_inner);
        let say = |line: &str| match &*download {
            Some(download) => download.say(line),
            None => eprintln!("lily: {line}"),
        };
        match event {
            Event::Begin { bytes, here } => {
                // Hashing what is there may take a while.
                if here > 0 && here < bytes {
                    say(&format!("{} of {} are here already", DecimalBytes(here), DecimalBytes(bytes)));
                }
                *download = Some(Download::new(bytes, here));
            }
            Event::Fetched(bytes) => download.iter().for_each(|download| download.fetched(bytes)),
            Event::Whole(_) => {}
            Event::Again { what, reason, wait } => {
                say(&format!(
                    "{what}: {reason}; trying again in {:.0} s, from what is here",
                    wait.as_secs_f64()
                ));
            }
            Event::Wrong { file, bytes } => {
                say(&format!("{file} is not as the hub has it, and is fetched again"));
                download.iter().for_each(|download| download.taken_away(bytes));
            }
            Event::Waiting(file) => {
                say(&format!("{file} is being fetched by another program; waiting for it"))
            }
        }
    }

    /// Takes the bar off the screen.
    fn clear<T>(&self, outcome: T) -> T {
        if let Some(download) = self.download.lock().unwrap_or_else(PoisonError::into_inner).take() {
            download.clear();
        }
        outcome
    }
}
