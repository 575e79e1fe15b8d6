//! A running `lily-server`, and HTTP over a plain socket.

#![allow(dead_code, reason = "each test program uses a part")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// Longest wait for something that must happen soon; only a failing test waits so long.
const PATIENCE: Duration = Duration::from_secs(180);

/// The body that asks one question.
pub fn question(text: &str) -> Value {
    json!({"messages": [{"role": "user", "content": text}], "max_tokens": 200})
}

/// `body` with further or other fields.
pub fn with(mut body: Value, fields: Value) -> Value {
    for (name, value) in fields.as_object().expect("fields are an object") {
        body[name] = value.clone();
    }
    body
}

/// A `lily-server` on a free port, ended with the test.
pub struct Server {
    process: Child,
    address: String,
    log: Arc<Mutex<Vec<String>>>,
}

impl Server {
    /// Starts the demo with further flags and waits until it serves.
    pub fn start(flags: &[&str]) -> Server {
        let mut process = Command::new(env!("CARGO_BIN_EXE_lily-server"))
            .args(["--port", "0"])
            .args(flags)
            .stderr(Stdio::piped())
            .spawn()
            .expect("the server starts");
        let mut log = BufReader::new(process.stderr.take().expect("stderr is piped")).lines();
        let address = log
            .by_ref()
            .map_while(Result::ok)
            .find_map(|line| {
                let (_, rest) = line.split_once("serving at http://")?;
                Some(rest.split_once('/')?.0.to_string())
            })
            .expect("the server says where it serves");
        // A full pipe would block the server.
        let lines = Arc::new(Mutex::new(Vec::new()));
        let written = Arc::clone(&lines);
        std::thread::spawn(move || {
            log.map_while(Result::ok)
                .for_each(|line| written.lock().expect("no test panics here").push(line));
        });
        Server { process, address, log: lines }
    }

    /// Waits for a line that the server writes after it has begun to serve.
    pub fn logged(&self, wanted: impl Fn(&str) -> bool) -> String {
        let start = Instant::now();
        loop {
            let lines = self.log.lock().expect("no test panics here").clone();
            if let Some(line) = lines.iter().find(|line| wanted(line)) {
                return line.clone();
            }
            assert!(start.elapsed() < PATIENCE, "no such line among {lines:#?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// All that the server has written since it began to serve.
    pub fn all_logged(&self) -> String {
        self.log.lock().expect("no test panics here").join("\n")
    }

    /// A connection on which nothing was sent yet.
    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).expect("the server accepts");
        stream.set_read_timeout(Some(PATIENCE)).expect("the socket takes a time-out");
        stream
    }

    /// Sends a request and returns the open connection.
    pub fn open(&self, method: &str, path: &str, headers: &str, body: &[u8]) -> Connection {
        let mut stream = self.connect();
        let length = body.len();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: lily\r\nConnection: close\r\nContent-Length: {length}\r\n{headers}\r\n"
        );
        stream.write_all(head.as_bytes()).expect("the server reads the head");
        // A server that refuses a body may close before it has read all of it.
        let _ = stream.write_all(body);
        Connection { reader: BufReader::new(stream) }
    }

    /// Sends a request and reads the whole response.
    pub fn request(&self, method: &str, path: &str, body: &str) -> Response {
        self.open(method, path, "", body.as_bytes()).response()
    }

    /// A chat request.
    pub fn chat(&self, body: &Value) -> Response {
        self.request("POST", "/v1/chat/completions", &body.to_string())
    }

    /// Waits until the engine works on `count` requests.
    pub fn wait_until_running(&self, count: u64) {
        self.wait_until("running", count);
    }

    /// Waits until `/health` counts so many requests as `state`.
    pub fn wait_until(&self, state: &str, count: u64) {
        let start = Instant::now();
        loop {
            let health = self.request("GET", "/health", "").json();
            if health[state] == count {
                return;
            }
            assert!(start.elapsed() < PATIENCE, "{count} should be {state}: {health}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Sends SIGTERM.
    pub fn terminate(&self) {
        let id = self.process.id().to_string();
        assert!(Command::new("kill").arg(id).status().expect("kill runs").success());
    }

    /// Waits for the process to end by itself and returns its exit code.
    pub fn exit_code(&mut self) -> Option<i32> {
        let start = Instant::now();
        loop {
            if let Some(status) = self.process.try_wait().expect("the process can be waited for") {
                return status.code();
            }
            assert!(start.elapsed() < PATIENCE, "the server does not end");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A connection whose response has not been read yet.
pub struct Connection {
    reader: BufReader<TcpStream>,
}

impl Connection {
    /// The next line of the response, without its end; `None` after the last.
    pub fn line(&mut self) -> Option<String> {
        let mut line = String::new();
        match self.reader.read_line(&mut line) {
            Ok(0) => None,
            outcome => {
                outcome.expect("the response goes on");
                Some(line.trim_end().to_string())
            }
        }
    }

    /// Reads on to the first event of a stream.
    pub fn first_event(&mut self) -> String {
        loop {
            let line = self.line().expect("the stream has an event");
            if let Some(data) = line.strip_prefix("data: ") {
                return data.to_string();
            }
        }
    }

    /// Reads the response to its end.
    pub fn response(mut self) -> Response {
        let status_line = self.line().expect("there is a response");
        let status =
            status_line.split(' ').nth(1).and_then(|code| code.parse().ok()).expect("it has a status");
        let mut headers = Vec::new();
        while let Some(line) = self.line().filter(|line| !line.is_empty()) {
            headers.push(line.to_ascii_lowercase());
        }
        let chunked = headers.iter().any(|header| header == "transfer-encoding: chunked");
        let body = if chunked { self.chunks() } else { self.rest() };
        Response { status, headers, body: String::from_utf8(body).expect("a body is UTF-8") }
    }

    fn rest(&mut self) -> Vec<u8> {
        let mut body = Vec::new();
        // A reset after the response is how a server closes on a body that it refused.
        let _ = self.reader.read_to_end(&mut body);
        body
    }

    fn chunks(&mut self) -> Vec<u8> {
        let mut body = Vec::new();
        loop {
            let size = self.line().expect("chunks end with an empty one");
            let size = usize::from_str_radix(&size, 16).expect("a chunk begins with its size");
            if size == 0 {
                return body;
            }
            let start = body.len();
            body.resize(start + size, 0);
            self.reader.read_exact(&mut body[start..]).expect("a chunk is whole");
            self.line();
        }
    }
}

/// A response.
#[derive(Debug)]
pub struct Response {
    pub status: u16,
    /// In lower case.
    pub headers: Vec<String>,
    pub body: String,
}

impl Response {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error} in {self:?}"))
    }

    /// The events of a stream whose events have names: each one's name and data.
    pub fn named_events(&self) -> Vec<(String, Value)> {
        assert!(self.headers.iter().any(|header| header == "content-type: text/event-stream"), "{self:?}");
        let event = |text: &str| {
            let (name, data) = text.split_once('\n').expect("an event has two lines");
            let name = name.strip_prefix("event: ").expect("the first names it");
            let data = data.strip_prefix("data: ").expect("the second is its data");
            (name.to_string(), serde_json::from_str(data).expect("an event is JSON"))
        };
        self.body.split_terminator("\n\n").map(event).collect()
    }

    /// The events of a stream, which must end as OpenAI's protocol says.
    pub fn events(&self) -> Vec<Value> {
        assert!(self.headers.iter().any(|header| header == "content-type: text/event-stream"), "{self:?}");
        let mut data: Vec<&str> = self.body.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
        assert_eq!(data.pop(), Some("[DONE]"), "{self:?}");
        data.into_iter().map(|event| serde_json::from_str(event).expect("an event is JSON")).collect()
    }
}
