//! The hub's routes.
//!
//! | route | gives |
//! |---|---|
//! | `GET /api/models/REPO/revision/REV?blobs=true` | the commit; names, sizes and hashes of files |
//! | `HEAD /REPO/resolve/COMMIT/FILE` | size and hash of a file, where the list has none: `x-linked-size` and `x-linked-etag`, else `content-length` and `etag` |
//! | `GET /REPO/resolve/COMMIT/FILE` | its bytes from the one that `Range` names, usually after a redirect to where they are stored |
//!
//! The token goes to the hub's own host and to no other.

use std::io::Read;
use std::time::Duration;

use serde::Deserialize;
use ureq::config::RedirectAuthHeaders;
use ureq::http::{HeaderMap, Response, StatusCode, header};
use ureq::{Agent, Body};

use crate::cache::is_etag;
use crate::error::HubError;
use crate::repo::{Repo, is_commit};
use crate::settings::Settings;

/// How long a connection may take to be made.
const CONNECT_TIME: Duration = Duration::from_secs(20);
/// Redirects within the hub, as renamed repositories have them.
const MOST_REDIRECTS: usize = 5;
/// The longest list that is read.
const MOST_LIST: u64 = 64 << 20;

/// The files of a commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listing {
    /// The commit that the revision stands for.
    pub commit: String,
    /// Its files.
    pub files: Vec<RemoteFile>,
}

/// A file on the hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteFile {
    /// Its name, with the folders before it.
    pub name: String,
    /// Size in bytes and hash, where the list has them.
    pub known: Option<Known>,
}

/// What is known of a file before it is here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Known {
    /// Its bytes.
    pub size: u64,
    /// SHA-256 of a large file, git's SHA-1 of a small one; the file's name in the cache.
    pub etag: String,
}

/// Why a request gave nothing.
pub(crate) enum Failure {
    /// It may succeed later, after `wait` where the server says so.
    Again {
        /// Why.
        reason: String,
        /// How long the server wants to be left alone.
        wait: Option<Duration>,
        /// Whether it was for too many requests.
        busy: bool,
    },
    /// It will not.
    Final(HubError),
}

/// Speaks with the hub.
pub(crate) struct Client {
    agent: Agent,
    pub(crate) endpoint: String,
    authorization: Option<String>,
}

impl Client {
    /// A client that takes a connection for lost after so much `silence`.
    pub(crate) fn new(settings: &Settings, silence: Duration) -> Client {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects_will_error(false)
            .redirect_auth_headers(RedirectAuthHeaders::SameHost)
            .timeout_connect(Some(CONNECT_TIME))
            .timeout_recv_response(Some(silence))
            .timeout_per_read(Some(silence))
            .user_agent(concat!("lily/", env!("CARGO_PKG_VERSION")));
        Client {
            agent: Agent::new_with_config(config.build()),
            endpoint: settings.endpoint.clone(),
            authorization: settings.token.as_ref().map(|token| format!("Bearer {token}")),
        }
    }

    /// The files of `repo`.
    pub(crate) fn list(&self, repo: &Repo) -> Result<Listing, Failure> {
        let revision = escape(repo.revision()).replace('/', "%2F");
        let url = format!("{}/api/models/{}/revision/{revision}?blobs=true", self.endpoint, repo.name());
        let what = format!("model {repo}");
        let answer = self.checked(self.get(&url, None).map_err(|error| self.failed(error))?, &url, &what)?;
        let mut text = Vec::new();
        answer
            .into_body()
            .into_reader()
            .take(MOST_LIST)
            .read_to_end(&mut text)
            .map_err(|error| Failure::Again { reason: error.to_string(), wait: None, busy: false })?;
        read_list(&text).map_err(|problem| Failure::Final(HubError::Answer { url, problem }))
    }

    /// Size and hash of a file.
    pub(crate) fn head(&self, repo: &Repo, commit: &str, name: &str) -> Result<Known, Failure> {
        let first = self.address(repo, commit, name);
        let mut url = first.clone();
        for _ in 0..=MOST_REDIRECTS {
            let mut request = self.agent.head(&url).config().max_redirects(0).build();
            if let Some(value) = &self.authorization {
                request = request.header(header::AUTHORIZATION, value);
            }
            let answer = request.call().map_err(|error| self.failed(error))?;
            let headers = answer.headers();
            let known = known(headers, "x-linked-size", "x-linked-etag");
            let status = answer.status();
            if !status.is_redirection() {
                let answer = self.checked(answer, &url, &file_of(repo, name))?;
                let plain = known.or_else(|| known_of(answer.headers()));
                return plain.ok_or_else(|| answered(&url, "neither size nor hash of the file"));
            }
            if let Some(known) = known {
                return Ok(known);
            }
            // Only within the hub: hashes of other places are not the hub's.
            let to = text(headers, "location").unwrap_or_default();
            url = match to.strip_prefix('/') {
                Some(path) => format!("{}/{path}", origin(&self.endpoint)),
                None if origin(&to) == origin(&self.endpoint) => to,
                None => return Err(answered(&url, "a redirect without size and hash of the file")),
            };
        }
        Err(answered(&first, "one redirect after another"))
    }

    /// The bytes of a file from `start` on.
    pub(crate) fn bytes(
        &self,
        repo: &Repo,
        commit: &str,
        name: &str,
        start: u64,
    ) -> Result<Box<dyn Read>, Failure> {
        let url = self.address(repo, commit, name);
        let answer = self.checked(
            self.get(&url, Some(start)).map_err(|error| self.failed(error))?,
            &url,
            &file_of(repo, name),
        )?;
        let skip = match answer.status() {
            // The range was not heeded: what is here already comes once more.
            StatusCode::OK => start,
            StatusCode::PARTIAL_CONTENT => {
                let range = text(answer.headers(), "content-range").unwrap_or_default();
                let begins = range.strip_prefix("bytes ").and_then(|range| range.split('-').next());
                if begins.and_then(|begins| begins.parse().ok()) != Some(start) {
                    return Err(answered(
                        &url,
                        &format!("the bytes {range:?}, and those from {start} on were asked for"),
                    ));
                }
                0
            }
            status => return Err(answered(&url, &format!("status {status}"))),
        };
        let mut body = answer.into_body().into_reader();
        let skipped = std::io::copy(&mut (&mut body).take(skip), &mut std::io::sink());
        match skipped {
            Ok(skipped) if skipped == skip => Ok(Box::new(body)),
            Ok(_) => Err(Failure::Again { reason: "it broke off".to_owned(), wait: None, busy: false }),
            Err(error) => Err(Failure::Again { reason: error.to_string(), wait: None, busy: false }),
        }
    }

    fn get(&self, url: &str, start: Option<u64>) -> Result<Response<Body>, ureq::Error> {
        let mut request = self.agent.get(url);
        if let Some(value) = &self.authorization {
            request = request.header(header::AUTHORIZATION, value);
        }
        if let Some(start) = start.filter(|start| *start > 0) {
            request = request.header(header::RANGE, format!("bytes={start}-"));
        }
        request.call()
    }

    /// What a request that got no answer comes to.
    fn failed(&self, error: ureq::Error) -> Failure {
        match error {
            // Nothing that waiting would change.
            ureq::Error::Tls(_)
            | ureq::Error::Rustls(_)
            | ureq::Error::BadUri(_)
            | ureq::Error::InvalidProxyUrl => Failure::Final(HubError::Unreachable {
                endpoint: self.endpoint.clone(),
                reason: error.to_string(),
            }),
            error => Failure::Again { reason: error.to_string(), wait: None, busy: false },
        }
    }

    fn address(&self, repo: &Repo, commit: &str, name: &str) -> String {
        format!("{}/{}/resolve/{commit}/{}", self.endpoint, repo.name(), escape(name))
    }

    /// The answer, where its status is one of success.
    fn checked(&self, answer: Response<Body>, url: &str, what: &str) -> Result<Response<Body>, Failure> {
        let status = answer.status();
        if status.is_success() {
            return Ok(answer);
        }
        let endpoint = self.endpoint.clone();
        let again = |busy| Failure::Again {
            reason: format!("status {}", status.as_u16()),
            wait: text(answer.headers(), "retry-after")
                .and_then(|value| value.trim().parse().ok())
                .map(Duration::from_secs),
            busy,
        };
        Err(match status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Failure::Final(HubError::Denied {
                endpoint,
                what: what.to_owned(),
                status: status.as_u16(),
                with_token: self.authorization.is_some(),
            }),
            StatusCode::NOT_FOUND => Failure::Final(HubError::NotFound { endpoint, what: what.to_owned() }),
            StatusCode::TOO_MANY_REQUESTS => again(true),
            StatusCode::REQUEST_TIMEOUT => again(false),
            _ if status.is_server_error() => again(false),
            _ => answered(url, &format!("status {}", status.as_u16())),
        })
    }
}

fn file_of(repo: &Repo, name: &str) -> String {
    format!("file {name} in {repo}")
}

fn answered(url: &str, problem: &str) -> Failure {
    Failure::Final(HubError::Answer { url: url.to_owned(), problem: problem.to_owned() })
}

/// Scheme and host of an address.
fn origin(url: &str) -> &str {
    let host = url.find("://").map_or(0, |at| at + 3);
    url[host..].find('/').map_or(url, |end| &url[..host + end])
}

fn text(headers: &HeaderMap, name: &str) -> Option<String> {
    Some(headers.get(name)?.to_str().ok()?.to_owned())
}

fn known(headers: &HeaderMap, size: &str, etag: &str) -> Option<Known> {
    let etag = text(headers, etag)?;
    let etag = etag.trim_start_matches("W/").trim_matches('"').to_owned();
    let size = text(headers, size)?.parse().ok()?;
    is_etag(&etag).then_some(Known { size, etag })
}

fn known_of(headers: &HeaderMap) -> Option<Known> {
    known(headers, "content-length", "etag")
}

/// Characters that have a meaning in addresses, written as such.
fn escape(name: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte);
    name.bytes()
        .map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}

/// The hub's list of files.
fn read_list(text: &[u8]) -> Result<Listing, String> {
    #[derive(Deserialize)]
    struct Model {
        sha: String,
        #[serde(default)]
        siblings: Vec<Sibling>,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Sibling {
        rfilename: String,
        size: Option<u64>,
        blob_id: Option<String>,
        lfs: Option<Lfs>,
    }
    #[derive(Deserialize)]
    struct Lfs {
        sha256: Option<String>,
    }
    let model: Model = serde_json::from_slice(text)
        .map_err(|error| format!("something that is no list of files ({error})"))?;
    if !is_commit(&model.sha) {
        return Err(format!("{:?} for a commit", model.sha));
    }
    let file = |sibling: Sibling| {
        let etag = match sibling.lfs {
            Some(lfs) => lfs.sha256,
            None => sibling.blob_id,
        };
        let known = sibling.size.zip(etag.filter(|etag| is_etag(etag)));
        RemoteFile { name: sibling.rfilename, known: known.map(|(size, etag)| Known { size, etag }) }
    };
    Ok(Listing { commit: model.sha, files: model.siblings.into_iter().map(file).collect() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_read_with_what_it_knows() {
        let (commit, sha256, git) = ("1a".repeat(20), "2b".repeat(32), "3c".repeat(20));
        let text = format!(
            r#"{{"id": "a/b", "sha": "{commit}", "siblings": [
                {{"rfilename": "model.safetensors", "size": 7, "blobId": "{git}", "lfs": {{"sha256": "{sha256}", "size": 7}}}},
                {{"rfilename": "config.json", "size": 5, "blobId": "{git}"}},
                {{"rfilename": "README.md"}}, {{"rfilename": "x", "size": 1, "blobId": "../../x"}}]}}"#
        );
        let listing = read_list(text.as_bytes()).unwrap();
        assert_eq!(listing.commit, commit);
        let known: Vec<_> = listing.files.iter().map(|file| file.known.clone()).collect();
        let some = |size, etag| Some(Known { size, etag });
        assert_eq!(known, [some(7, sha256), some(5, git), None, None]);
        assert!(read_list(b"<html>").is_err());
        assert!(read_list(br#"{"sha": "../x", "siblings": []}"#).is_err());
    }

    #[test]
    fn origins_and_names_are_taken_apart() {
        assert_eq!(origin("https://a.example:1/b/c"), "https://a.example:1");
        assert_eq!(origin("http://a"), "http://a");
        assert_eq!(escape("a b/c%?.json"), "a%20b/c%25%3F.json");
    }
}
