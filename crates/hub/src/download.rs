//! Files that grow until they are whole.
//!
//! Each file grows at its end and nowhere else, so its length is all there is to know after whatever ended the program:
//! the bytes that are there are hashed, and the request is for those that follow. A few files come at once. A
//! connection that breaks is made again, sooner at first and later then; attempts count only as long as no byte comes
//! in between, so a line that breaks every minute is no reason to give up. A file that came with a wrong byte somewhere is
//! taken away and comes again, once.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::cache::Cache;
use crate::client::{Client, Failure, Known, Listing};
use crate::error::HubError;
use crate::hash::Hasher;
use crate::repo::Repo;
use crate::settings::Settings;

/// Bytes that are written at once.
const PIECE: usize = 256 << 10;
/// The longest wait of its own accord.
const MOST_WAIT: Duration = Duration::from_secs(60);
/// The longest wait that a server is granted; beyond it, the user is told instead.
const MOST_GRANTED: Duration = Duration::from_secs(300);
/// How soon one that waits notices that another has failed.
const NOTICE: Duration = Duration::from_millis(100);

/// How long to try.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// Attempts after the first, each without a byte in between.
    pub retries: u32,
    /// The wait before the first of them; it doubles.
    pub wait: Duration,
    /// How long a server may say nothing before its connection counts as lost.
    pub silence: Duration,
}

impl Default for Patience {
    fn default() -> Patience {
        Patience { retries: 6, wait: Duration::from_secs(1), silence: Duration::from_secs(60) }
    }
}

/// What happens, told from several threads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// It begins.
    Begin {
        /// Bytes of all files.
        bytes: u64,
        /// Those that are here already.
        here: u64,
    },
    /// So many bytes more are here.
    Fetched(u64),
    /// A file is whole, and has the hub's hash.
    Whole(&'a str),
    /// A request failed and is made again.
    Again {
        /// What it was for.
        what: &'a str,
        /// Why it failed.
        reason: &'a str,
        /// How long from now.
        wait: Duration,
    },
    /// A file has other bytes than the hub's; it is taken away and comes again.
    Wrong {
        /// Its name.
        file: &'a str,
        /// Bytes that were taken away.
        bytes: u64,
    },
    /// Another program is fetching the same file, and is waited for.
    Waiting(&'a str),
}

/// Hears what happens.
pub type Listener<'a> = &'a (dyn Fn(Event<'_>) + Sync);

/// The hub, and the cache before it.
pub struct Hub {
    settings: Settings,
    client: Client,
    patience: Patience,
    jobs: usize,
}

impl Hub {
    /// With at most `jobs` files at once.
    pub fn new(settings: Settings, patience: Patience, jobs: usize) -> Hub {
        Hub { client: Client::new(&settings, patience.silence), settings, patience, jobs: jobs.max(1) }
    }

    /// What it was made with.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The repository's folder in the cache.
    pub fn cache(&self, repo: &Repo) -> Cache {
        Cache::new(&self.settings.cache, repo)
    }

    /// Asks the hub for the files of `repo`, with a `patience` of its own.
    ///
    /// # Errors
    /// [`HubError`]: offline, no answer, no such repository, or one that may not be read.
    pub fn list(&self, repo: &Repo, patience: Patience, listener: Listener<'_>) -> Result<Listing, HubError> {
        if self.settings.offline {
            return Err(HubError::Offline { repo: repo.to_string() });
        }
        let mut attempts = Attempts::new(patience);
        let stop = AtomicBool::new(false);
        loop {
            match self.client.list(repo) {
                Ok(listing) => return Ok(listing),
                Err(failure) => attempts.again(
                    failure,
                    "the list of files",
                    listener,
                    |reason, _| HubError::Unreachable { endpoint: self.client.endpoint.clone(), reason },
                    &self.client.endpoint,
                    &stop,
                )?,
            }
        }
    }

    /// Brings the files `names` of the listing, and gives the directory that they are in. Names that the listing does not
    /// have, or that lie in a folder, are left out.
    ///
    /// # Errors
    /// [`HubError`]; what was fetched stays, and the next call goes on from there.
    pub fn fetch(
        &self,
        repo: &Repo,
        listing: &Listing,
        names: &[String],
        listener: Listener<'_>,
    ) -> Result<PathBuf, HubError> {
        let cache = self.cache(repo);
        cache.prepare()?;
        let task = Task {
            hub: self,
            cache: &cache,
            repo,
            commit: &listing.commit,
            listener,
            stop: &AtomicBool::new(false),
        };
        let mut wanted = Vec::new();
        for file in &listing.files {
            if names.contains(&file.name) && !file.name.contains(['/', '\\']) {
                let known = match &file.known {
                    Some(known) => known.clone(),
                    None => task.ask(&file.name)?,
                };
                wanted.push((file.name.as_str(), known));
            }
        }
        let bytes = wanted.iter().map(|(_, known)| known.size).sum();
        let here = wanted.iter().map(|(_, known)| here(&cache, known)).sum();
        let free = fs4::available_space(cache.dir()).map_err(HubError::io(cache.dir()))?;
        if free < bytes - here {
            return Err(HubError::TooSmall { dir: cache.dir().to_owned(), free, needed: bytes - here });
        }
        listener(Event::Begin { bytes, here });
        // Large ones first, so that the last to come is not the longest.
        wanted.sort_by_key(|(_, known)| std::cmp::Reverse(known.size));
        task.all(&wanted, self.jobs)?;
        Ok(cache.snapshot(&listing.commit))
    }

    /// Writes down that all that is wanted of the revision is here.
    ///
    /// # Errors
    /// [`HubError::Io`].
    pub fn finish(&self, repo: &Repo, listing: &Listing) -> Result<(), HubError> {
        self.cache(repo).refer(repo, &listing.commit)
    }
}

/// Bytes of a file that are here already.
fn here(cache: &Cache, known: &Known) -> u64 {
    let bytes = |path: &Path| fs::metadata(path).map(|meta| meta.len());
    match bytes(&cache.blob(&known.etag)) {
        Ok(bytes) if bytes == known.size => bytes,
        // More than the whole cannot be its beginning.
        _ => bytes(&cache.incomplete(&known.etag)).ok().filter(|bytes| *bytes <= known.size).unwrap_or(0),
    }
}

/// The files of one call.
struct Task<'a> {
    hub: &'a Hub,
    cache: &'a Cache,
    repo: &'a Repo,
    commit: &'a str,
    listener: Listener<'a>,
    stop: &'a AtomicBool,
}

impl Task<'_> {
    /// Fetches all of `files`, `jobs` at once; the first error ends the others.
    fn all(&self, files: &[(&str, Known)], jobs: usize) -> Result<(), HubError> {
        let next = AtomicUsize::new(0);
        let work = || -> Result<(), HubError> {
            while let Some((name, known)) = files.get(next.fetch_add(1, Ordering::Relaxed)) {
                let fetched = self.file(name, known);
                if fetched.is_err() {
                    self.stop.store(true, Ordering::Relaxed);
                }
                fetched?;
            }
            Ok(())
        };
        let outcomes: Vec<_> = thread::scope(|scope| {
            let workers: Vec<_> = (0..jobs.min(files.len())).map(|_| scope.spawn(work)).collect();
            workers.into_iter().map(|worker| worker.join().unwrap_or(Err(HubError::Stopped))).collect()
        });
        // Those that were stopped have nothing to say as long as there is the one that stopped them.
        let mut errors: Vec<HubError> = outcomes.into_iter().filter_map(Result::err).collect();
        let first = errors.iter().position(|error| !matches!(error, HubError::Stopped)).unwrap_or(0);
        if errors.is_empty() { Ok(()) } else { Err(errors.swap_remove(first)) }
    }

    /// Size and hash of a file that the list knows by name alone.
    fn ask(&self, name: &str) -> Result<Known, HubError> {
        let mut attempts = Attempts::new(self.hub.patience);
        let endpoint = &self.hub.client.endpoint;
        loop {
            match self.hub.client.head(self.repo, self.commit, name) {
                Ok(known) => return Ok(known),
                Err(failure) => attempts.again(
                    failure,
                    name,
                    self.listener,
                    |reason, _| HubError::Unreachable { endpoint: endpoint.clone(), reason },
                    endpoint,
                    self.stop,
                )?,
            }
        }
    }

    /// Brings one file.
    fn file(&self, name: &str, known: &Known) -> Result<(), HubError> {
        let (blob, path) = (self.cache.blob(&known.etag), self.cache.incomplete(&known.etag));
        let _lock = self.cache.lock(&known.etag, || (self.listener)(Event::Waiting(name)))?;
        if !fs::metadata(&blob).is_ok_and(|meta| meta.len() == known.size) {
            let mut file = File::options()
                .create(true)
                .read(true)
                .append(true)
                .open(&path)
                .map_err(HubError::io(&path))?;
            if self.grow(&mut file, &path, name, known)?.is_some() {
                (self.listener)(Event::Wrong { file: name, bytes: known.size });
                file.set_len(0).map_err(HubError::io(&path))?;
                if let Some(found) = self.grow(&mut file, &path, name, known)? {
                    drop(file);
                    fs::remove_file(&path).map_err(HubError::io(&path))?;
                    return Err(HubError::Wrong {
                        file: name.to_owned(),
                        expected: known.etag.clone(),
                        found,
                        endpoint: self.hub.client.endpoint.clone(),
                    });
                }
            }
            file.sync_all().map_err(HubError::io(&path))?;
            fs::rename(&path, &blob).map_err(HubError::io(&blob))?;
        }
        self.cache.link(self.commit, name, &known.etag)?;
        (self.listener)(Event::Whole(name));
        Ok(())
    }

    /// Lets the file grow to its size; the hash of what it then holds where that is not the hub's.
    fn grow(
        &self,
        file: &mut File,
        path: &Path,
        name: &str,
        known: &Known,
    ) -> Result<Option<String>, HubError> {
        let mut length = file.metadata().map_err(HubError::io(path))?.len();
        if length > known.size {
            file.set_len(0).map_err(HubError::io(path))?;
            length = 0;
        }
        let mut hasher = Hasher::for_etag(&known.etag, known.size);
        self.hash(path, length, &mut hasher)?;
        let mut attempts = Attempts::new(self.hub.patience);
        while length < known.size {
            let before = length;
            let failure = match self.hub.client.bytes(self.repo, self.commit, name, length) {
                Ok(body) => self.take(body, file, path, known, &mut length, &mut hasher)?,
                Err(failure) => Some(failure),
            };
            attempts.came(length > before);
            if let Some(failure) = failure {
                let lost = |reason, attempts| HubError::Lost {
                    file: name.to_owned(),
                    reason,
                    here: length,
                    of: known.size,
                    attempts,
                };
                attempts.again(failure, name, self.listener, lost, &self.hub.client.endpoint, self.stop)?;
            }
        }
        Ok(hasher.finish().filter(|found| *found != known.etag))
    }

    /// Takes the first `length` bytes of the file at `path` into the hash.
    fn hash(&self, path: &Path, length: u64, hasher: &mut Hasher) -> Result<(), HubError> {
        if length == 0 {
            return Ok(());
        }
        let mut file = File::open(path).map_err(HubError::io(path))?.take(length);
        let mut piece = vec![0; PIECE];
        loop {
            self.check_stop()?;
            match file.read(&mut piece).map_err(HubError::io(path))? {
                0 => return Ok(()),
                count => hasher.update(&piece[..count]),
            }
        }
    }

    /// Writes what `body` gives to the end of the file; why there is no more, where the file is not whole then.
    fn take(
        &self,
        mut body: impl Read,
        file: &mut File,
        path: &Path,
        known: &Known,
        length: &mut u64,
        hasher: &mut Hasher,
    ) -> Result<Option<Failure>, HubError> {
        let again = |reason: String| Ok(Some(Failure::Again { reason, wait: None, busy: false }));
        let mut piece = vec![0; PIECE];
        while *length < known.size {
            self.check_stop()?;
            let room = usize::try_from(known.size - *length).unwrap_or(PIECE).min(PIECE);
            let count = match body.read(&mut piece[..room]) {
                Ok(0) => return again("it broke off".to_owned()),
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return again(error.to_string()),
            };
            if let Err(error) = file.write_all(&piece[..count]) {
                return Err(self.unwritten(error, file, path, known, *length));
            }
            hasher.update(&piece[..count]);
            *length += count as u64;
            (self.listener)(Event::Fetched(count as u64));
        }
        Ok(None)
    }

    /// The error of a write; what of it came onto the disk is cut off again, so that the length is that of what was hashed.
    fn unwritten(&self, error: io::Error, file: &File, path: &Path, known: &Known, length: u64) -> HubError {
        // Where even that fails, the hash at the end finds it.
        let _ = file.set_len(length);
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
                HubError::Full { path: path.to_owned(), here: length, of: known.size }
            }
            _ => HubError::Io { path: path.to_owned(), reason: error },
        }
    }

    fn check_stop(&self) -> Result<(), HubError> {
        check(self.stop)
    }
}

fn check(stop: &AtomicBool) -> Result<(), HubError> {
    if stop.load(Ordering::Relaxed) { Err(HubError::Stopped) } else { Ok(()) }
}

/// Failures in a row; the first may have brought something before it failed, the others did not.
struct Attempts {
    patience: Patience,
    failed: u32,
    /// Those of them that brought nothing.
    barren: u32,
}

impl Attempts {
    fn new(patience: Patience) -> Attempts {
        Attempts { patience, failed: 0, barren: 0 }
    }

    /// Whether something came, before what came ended.
    fn came(&mut self, something: bool) {
        match something {
            true => (self.failed, self.barren) = (0, 0),
            false => self.barren += 1,
        }
    }

    /// Waits before the next attempt, as long as nothing is to `stop`, or says what `lost` makes of it where there is none.
    fn again(
        &mut self,
        failure: Failure,
        what: &str,
        listener: Listener<'_>,
        lost: impl FnOnce(String, u32) -> HubError,
        endpoint: &str,
        stop: &AtomicBool,
    ) -> Result<(), HubError> {
        let (reason, wait, busy) = match failure {
            Failure::Final(error) => return Err(error),
            Failure::Again { reason, wait, busy } => (reason, wait, busy),
        };
        self.failed += 1;
        let tried = self.failed > self.patience.retries;
        if wait.is_some_and(|wait| wait > MOST_GRANTED) || (busy && tried) {
            return Err(HubError::Busy { endpoint: endpoint.to_owned(), wait });
        }
        if tried {
            return Err(lost(reason, self.barren));
        }
        let own = self.patience.wait.saturating_mul(1 << (self.failed - 1).min(16)).min(MOST_WAIT);
        let wait = wait.unwrap_or(own);
        listener(Event::Again { what, reason: &reason, wait });
        let start = Instant::now();
        while let Some(left) = wait.checked_sub(start.elapsed()).filter(|left| !left.is_zero()) {
            check(stop)?;
            thread::sleep(left.min(NOTICE));
        }
        Ok(())
    }
}
