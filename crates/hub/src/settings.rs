//! Where the hub is, who asks, and where files go: from the environment variables that all Hugging Face tools read.
//!
//! | variable | |
//! |---|---|
//! | `HF_ENDPOINT` | the hub or a mirror of it, instead of `https://huggingface.co` |
//! | `HF_TOKEN`, else the file `HF_TOKEN_PATH`, else `HF_HOME/token` | for repositories that not everybody may read |
//! | `HF_HUB_CACHE`, else `HF_HOME/hub`, else `XDG_CACHE_HOME/huggingface/hub`, else `~/.cache/huggingface/hub` | where files go |
//! | `HF_HUB_OFFLINE` | 1 asks nobody and takes what is there |

use std::env;
use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::path::PathBuf;

use crate::error::HubError;

const ENDPOINT: &str = "https://huggingface.co";

/// All of them.
#[derive(Clone, PartialEq, Eq)]
pub struct Settings {
    /// The hub's address, without a slash at its end.
    pub endpoint: String,
    /// What says who asks.
    pub token: Option<String>,
    /// The directory of the cache: `models--OWNER--NAME` folders lie in it.
    pub cache: PathBuf,
    /// Whether nobody may be asked.
    pub offline: bool,
}

impl Settings {
    /// Those of this process.
    ///
    /// # Errors
    /// An address or a token that cannot be one; no place for files.
    pub fn from_env() -> Result<Settings, HubError> {
        Settings::from(|name| env::var_os(name))
    }

    /// Those that `variable` tells by their names.
    fn from(variable: impl Fn(&str) -> Option<OsString>) -> Result<Settings, HubError> {
        let value = |name: &str| variable(name).filter(|value| !value.is_empty());
        let path = |name: &str| value(name).map(PathBuf::from);
        let text = |name: &str| value(name).map(|value| value.to_string_lossy().trim().to_owned());

        let home = path("HF_HOME").or_else(|| {
            let base = path("XDG_CACHE_HOME").or_else(|| path(HOME).map(|home| home.join(".cache")));
            base.map(|base| base.join("huggingface"))
        });
        let cache = path("HF_HUB_CACHE").or_else(|| home.as_ref().map(|home| home.join("hub")));

        let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.to_owned());
        let endpoint = endpoint.trim_end_matches('/').to_owned();
        let bare = endpoint.strip_prefix("https://").or_else(|| endpoint.strip_prefix("http://"));
        if bare.is_none_or(|bare| bare.is_empty() || bare.contains([' ', '?', '#'])) {
            return Err(HubError::Endpoint(endpoint));
        }

        let file = path("HF_TOKEN_PATH").or_else(|| home.map(|home| home.join("token")));
        let kept = || Some(fs::read_to_string(file?).ok()?.trim().to_owned());
        let token = text("HF_TOKEN").or_else(kept).filter(|token| !token.is_empty());
        if token.as_ref().is_some_and(|token| !token.bytes().all(|byte| byte.is_ascii_graphic())) {
            return Err(HubError::Token);
        }

        let offline = text("HF_HUB_OFFLINE").is_some_and(|value| {
            ["1", "true", "yes", "on"].iter().any(|yes| value.eq_ignore_ascii_case(yes))
        });
        Ok(Settings { endpoint, token, cache: cache.ok_or(HubError::NoHome)?, offline })
    }
}

/// Where a user's own folder is named.
const HOME: &str = if cfg!(windows) { "USERPROFILE" } else { "HOME" };

// By hand, so that no log ever has the token.
impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Settings { endpoint, token, cache, offline } = self;
        let token = token.as_ref().map(|_| "…");
        f.debug_struct("Settings")
            .field("endpoint", endpoint)
            .field("token", &token)
            .field("cache", cache)
            .field("offline", offline)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(variables: &[(&str, &str)]) -> Result<Settings, HubError> {
        let found = |name: &str| variables.iter().find(|(key, _)| *key == name);
        Settings::from(|name| found(name).map(|(_, value)| OsString::from(value)))
    }

    #[test]
    fn the_variables_of_hugging_face_tools_are_honoured() {
        let plain = settings(&[(HOME, "/home/me")]).unwrap();
        assert_eq!(plain.endpoint, ENDPOINT);
        assert_eq!(plain.cache, PathBuf::from("/home/me/.cache/huggingface/hub"));
        assert_eq!((plain.token, plain.offline), (None, false));
        let all = settings(&[
            (HOME, "/home/me"),
            ("HF_HOME", "/data/hf"),
            ("HF_ENDPOINT", "http://mirror.example/"),
            ("HF_TOKEN", " hf_x\n"),
            ("HF_HUB_OFFLINE", "1"),
        ]);
        let all = all.unwrap();
        assert_eq!(all.endpoint, "http://mirror.example");
        assert_eq!(all.cache, PathBuf::from("/data/hf/hub"));
        assert_eq!((all.token.as_deref(), all.offline), (Some("hf_x"), true));
        assert!(!format!("{all:?}").contains("hf_x"));
        assert_eq!(settings(&[("HF_HUB_CACHE", "/c"), (HOME, "/h")]).unwrap().cache, PathBuf::from("/c"));
    }

    #[test]
    fn a_token_that_was_kept_is_found_and_the_variable_goes_first() {
        let home = tempfile::tempdir().unwrap();
        let home = home.path().to_str().unwrap();
        fs::write(PathBuf::from(home).join("token"), "hf_kept\n").unwrap();
        assert_eq!(settings(&[("HF_HOME", home)]).unwrap().token.as_deref(), Some("hf_kept"));
        let both = settings(&[("HF_HOME", home), ("HF_TOKEN", "hf_said")]).unwrap();
        assert_eq!(both.token.as_deref(), Some("hf_said"));
    }

    #[test]
    fn what_cannot_be_is_refused() {
        assert!(matches!(settings(&[]), Err(HubError::NoHome)));
        assert!(matches!(settings(&[(HOME, "/h"), ("HF_ENDPOINT", "ftp://x")]), Err(HubError::Endpoint(_))));
        assert!(matches!(settings(&[(HOME, "/h"), ("HF_TOKEN", "a\nb")]), Err(HubError::Token)));
    }
}
