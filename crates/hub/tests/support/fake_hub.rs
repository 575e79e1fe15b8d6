//! A server that speaks the hub's routes, and fails in the ways that lines and hubs fail.

#![allow(dead_code, reason = "each test program uses a part")]

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use sha1::Sha1;
use sha2::{Digest, Sha256};

/// The commit that `main` stands for.
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// How long a file waits for another; only a failing test waits so long.
const MOST_WAIT: Duration = Duration::from_secs(60);

/// What happens to one request for a file's bytes.
#[derive(Clone, Copy, Debug)]
pub enum Fault {
    /// The connection ends after so many bytes.
    Break(usize),
    /// So many bytes come, and then nothing, for as long as the client keeps the connection.
    Hang(usize),
    /// A status instead of bytes, with `Retry-After` where there is a number.
    Status(u16, Option<u64>),
    /// The byte there has other bits.
    WrongByte(usize),
    /// All bytes come, whatever was asked for.
    IgnoreRange,
    /// Nothing comes before another file was asked for.
    After(&'static str),
}

/// A file of the repository.
struct Stored {
    name: String,
    bytes: Vec<u8>,
    /// Whether it lies elsewhere, behind a redirect, under its SHA-256.
    large: bool,
    /// The size that the list has.
    listed: Option<u64>,
}

#[derive(Default)]
struct State {
    files: Vec<Stored>,
    token: Option<String>,
    /// Whether the list has no sizes and hashes.
    bare_list: bool,
    /// Faults of the next requests for bytes of a file, by its name.
    faults: VecDeque<(String, Fault)>,
    list_faults: VecDeque<Fault>,
    /// Each request for bytes: the file, and the first byte asked for.
    asked: Vec<(String, u64)>,
    /// Requests of any kind.
    requests: usize,
    /// Whether the place behind the redirect was shown a token.
    leaked: bool,
}

/// What is known, and a bell for each request for bytes.
#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    asked: Condvar,
}

/// The server; it lives as long as the test program.
pub struct FakeHub {
    port: u16,
    shared: Arc<Shared>,
}

impl FakeHub {
    /// With the repository `repo`; files of `large` bytes and more lie behind a redirect.
    pub fn start(repo: &str, files: &[(&str, &[u8])], large: usize) -> FakeHub {
        let stored = |(name, bytes): &(&str, &[u8])| Stored {
            name: (*name).to_owned(),
            bytes: bytes.to_vec(),
            large: bytes.len() >= large,
            listed: Some(bytes.len() as u64),
        };
        let state = State { files: files.iter().map(stored).collect(), ..State::default() };
        let shared = Arc::new(Shared { state: Mutex::new(state), ..Shared::default() });
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let (served, name) = (Arc::clone(&shared), repo.to_owned());
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (shared, name) = (Arc::clone(&served), name.clone());
                // A client that goes away ends the thread, which is nobody's failure.
                thread::spawn(move || answer(stream, &shared, &name, port));
            }
        });
        FakeHub { port, shared }
    }

    /// What `HF_ENDPOINT` is to be.
    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Lets only those read who show this token.
    pub fn require_token(&self, token: &str) {
        self.state().token = Some(token.to_owned());
    }

    /// Leaves sizes and hashes out of the list.
    pub fn leave_out_sizes(&self) {
        self.state().bare_list = true;
    }

    /// Has the list say another size of a file.
    pub fn list_size(&self, name: &str, size: u64) {
        let mut state = self.state();
        state.files.iter_mut().filter(|file| file.name == name).for_each(|file| file.listed = Some(size));
    }

    /// What happens to the next requests for bytes of `name`, one after the other.
    pub fn fail(&self, name: &str, faults: &[Fault]) {
        self.state().faults.extend(faults.iter().map(|fault| (name.to_owned(), *fault)));
    }

    /// What happens to the next requests for the list.
    pub fn fail_list(&self, faults: &[Fault]) {
        self.state().list_faults.extend(faults);
    }

    /// Asks for a file itself, as another client would, and does not wait for it.
    pub fn ask(&self, repo: &str, name: &str) {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).expect("it listens");
        write!(stream, "GET /{repo}/resolve/{COMMIT}/{name} HTTP/1.1\r\n\r\n").expect("it reads");
    }

    /// First bytes of the requests for bytes of `name`, since this was last asked.
    pub fn asked(&self, name: &str) -> Vec<u64> {
        let mut state = self.state();
        let (these, others) =
            std::mem::take(&mut state.asked).into_iter().partition(|(file, _)| file == name);
        state.asked = others;
        let these: Vec<(String, u64)> = these;
        these.into_iter().map(|(_, start)| start).collect()
    }

    /// Requests of any kind so far.
    pub fn requests(&self) -> usize {
        self.state().requests
    }

    /// Whether a token went where files are stored, which is not the hub.
    pub fn leaked(&self) -> bool {
        self.state().leaked
    }

    /// The name of the file in the cache.
    pub fn etag(&self, name: &str) -> String {
        let state = self.state();
        etag(state.files.iter().find(|file| file.name == name).expect("there is such a file"))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().expect("no thread panics with it")
    }
}

fn etag(file: &Stored) -> String {
    if file.large {
        return hex(&Sha256::digest(&file.bytes));
    }
    let mut hash = Sha1::new();
    hash.update(format!("blob {}\0", file.bytes.len()));
    hash.update(&file.bytes);
    hex(&hash.finalize())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("strings grow");
        text
    })
}

/// A request's first line and the headers that matter.
struct Asked {
    method: String,
    path: String,
    range: Option<u64>,
    token: Option<String>,
}

fn read_request(stream: &TcpStream) -> Option<Asked> {
    let mut lines = BufReader::new(stream.try_clone().ok()?).lines();
    let first = lines.next()?.ok()?;
    let mut words = first.split(' ');
    let (method, path) = (words.next()?.to_owned(), words.next()?.to_owned());
    let (mut range, mut token) = (None, None);
    for line in lines {
        let line = line.ok()?;
        let Some((name, value)) = line.split_once(": ") else { break };
        match name.to_ascii_lowercase().as_str() {
            "range" => range = value.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok(),
            "authorization" => token = value.strip_prefix("Bearer ").map(str::to_owned),
            _ => {}
        }
    }
    Some(Asked { method, path, range, token })
}

fn answer(mut stream: TcpStream, shared: &Shared, repo: &str, port: u16) -> Option<()> {
    let asked = read_request(&stream)?;
    let mut state = shared.state.lock().expect("no thread panics with it");
    state.requests += 1;
    if let Some(etag_asked) = asked.path.strip_prefix("/stored/") {
        state.leaked |= asked.token.is_some();
        let index = state.files.iter().position(|file| etag(file) == etag_asked)?;
        return bytes(stream, shared, state, index, &asked);
    }
    if state.token.is_some() && asked.token != state.token {
        return send(&mut stream, "401 Unauthorized", "", b"{\"error\": \"Invalid credentials\"}");
    }
    if asked.path == format!("/api/models/{repo}/revision/main?blobs=true") {
        if let Some(Fault::Status(status, wait)) = state.list_faults.pop_front() {
            return refuse(&mut stream, status, wait);
        }
        let text = list(&state, repo);
        return send(&mut stream, "200 OK", "Content-Type: application/json\r\n", text.as_bytes());
    }
    let name = asked.path.strip_prefix(&format!("/{repo}/resolve/{COMMIT}/")).map(str::to_owned);
    let index = state.files.iter().position(|file| Some(&file.name) == name.as_ref());
    let Some(index) = index else { return send(&mut stream, "404 Not Found", "", b"Entry not found") };
    let file = &state.files[index];
    let (etag, size) = (etag(file), file.bytes.len());
    if file.large {
        let headers = format!(
            "Location: http://localhost:{port}/stored/{etag}\r\nX-Repo-Commit: {COMMIT}\r\nX-Linked-Size: {size}\r\n\
             X-Linked-ETag: \"{etag}\"\r\nETag: \"something-else\"\r\n"
        );
        return send(&mut stream, "302 Found", &headers, b"");
    }
    if asked.method == "HEAD" {
        let head = format!(
            "HTTP/1.1 200 OK\r\nConnection: close\r\nETag: \"{etag}\"\r\nContent-Length: {size}\r\n\r\n"
        );
        return stream.write_all(head.as_bytes()).ok();
    }
    bytes(stream, shared, state, index, &asked)
}

fn list(state: &State, repo: &str) -> String {
    let siblings: Vec<String> = state
        .files
        .iter()
        .map(|file| match file.listed {
            _ if state.bare_list => format!(r#"{{"rfilename": "{}"}}"#, file.name),
            None => format!(r#"{{"rfilename": "{}"}}"#, file.name),
            Some(size) if file.large => format!(
                r#"{{"rfilename": "{}", "size": {size}, "blobId": "{COMMIT}", "lfs": {{"sha256": "{}", "size": {size}}}}}"#,
                file.name,
                etag(file)
            ),
            Some(size) => {
                format!(r#"{{"rfilename": "{}", "size": {size}, "blobId": "{}"}}"#, file.name, etag(file))
            }
        })
        .collect();
    format!(r#"{{"id": "{repo}", "sha": "{COMMIT}", "siblings": [{}]}}"#, siblings.join(", "))
}

/// Sends the bytes of a file, as far as the fault lets it.
fn bytes(
    mut stream: TcpStream,
    shared: &Shared,
    mut state: MutexGuard<'_, State>,
    index: usize,
    asked: &Asked,
) -> Option<()> {
    let name = state.files[index].name.clone();
    let mut bytes = state.files[index].bytes.clone();
    let mut start = asked.range.unwrap_or(0);
    state.asked.push((name.clone(), start));
    shared.asked.notify_all();
    let fault =
        state.faults.iter().position(|(file, _)| *file == name).and_then(|at| state.faults.remove(at));
    if let Some((_, Fault::After(other))) = fault {
        let not_yet = |state: &mut State| !state.asked.iter().any(|(file, _)| file == other);
        let waited = shared.asked.wait_timeout_while(state, MOST_WAIT, not_yet);
        // One that was not asked for ends the connection, which the client tells.
        if waited.expect("no thread panics with it").1.timed_out() {
            return None;
        }
    } else {
        drop(state);
    }
    let size = bytes.len();
    let mut end = size;
    let mut hangs = false;
    match fault.map(|(_, fault)| fault) {
        Some(Fault::Status(status, wait)) => return refuse(&mut stream, status, wait),
        Some(Fault::Break(count)) => end = size.min(start as usize + count),
        Some(Fault::Hang(count)) => (end, hangs) = (size.min(start as usize + count), true),
        Some(Fault::WrongByte(at)) => bytes[at] ^= 0x10,
        Some(Fault::IgnoreRange) => start = 0,
        Some(Fault::After(_)) | None => {}
    }
    let partial = asked.range.is_some() && start > 0;
    let status = if partial { "206 Partial Content" } else { "200 OK" };
    let range = format!("Content-Range: bytes {start}-{}/{size}\r\n", size - 1);
    let head = format!(
        "HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {}\r\n{}\r\n",
        size as u64 - start,
        if partial { range.as_str() } else { "" }
    );
    stream.write_all(head.as_bytes()).ok()?;
    stream.write_all(&bytes[start as usize..end]).ok()?;
    if hangs {
        // Until the client goes.
        let _ = stream.read(&mut [0]);
    }
    Some(())
}

fn refuse(stream: &mut TcpStream, status: u16, wait: Option<u64>) -> Option<()> {
    let wait = wait.map_or(String::new(), |seconds| format!("Retry-After: {seconds}\r\n"));
    send(stream, &format!("{status} Refused"), &wait, b"refused")
}

fn send(stream: &mut TcpStream, status: &str, headers: &str, body: &[u8]) -> Option<()> {
    let head =
        format!("HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {}\r\n{headers}\r\n", body.len());
    stream.write_all(head.as_bytes()).ok()?;
    stream.write_all(body).ok()
}
