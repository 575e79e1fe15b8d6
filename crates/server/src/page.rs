//! `GET /`: a page to chat on, one file without anything from elsewhere.
//!
//! The page is told what it may do by a policy that names its one script and its one style sheet by their hashes:
//! whatever else found its way into it, from a model's answer for one, would not run. It talks to the server that it
//! came from, and to nobody else.

use std::sync::LazyLock;

use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
};
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use sha2::{Digest, Sha256};

use crate::openapi;

/// Where it is.
pub const PATH: &str = "/";

/// The page.
const PAGE: &str = include_str!("page/index.html");

/// What the page may do.
static POLICY: LazyLock<String> = LazyLock::new(|| {
    format!(
        "default-src 'none'; script-src '{}'; style-src '{}'; img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'",
        hash("script"),
        hash("style"),
    )
});

/// The hash of the one element of this name, as a policy names it.
fn hash(element: &str) -> String {
    let (_, rest) = PAGE.split_once(&format!("<{element}>")).unwrap_or_default();
    let (text, _) = rest.split_once(&format!("</{element}>")).unwrap_or_default();
    format!("sha256-{}", STANDARD.encode(Sha256::digest(text)))
}

/// A page to chat on.
#[utoipa::path(
    get, path = PATH, tag = "Server",
    responses(
        (status = 200, description = "The page.", body = String, content_type = "text/html"),
        openapi::Failing,
    ),
)]
pub async fn page() -> Response {
    let headers = [
        (CONTENT_TYPE, "text/html; charset=utf-8"),
        (CONTENT_SECURITY_POLICY, POLICY.as_str()),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (REFERRER_POLICY, "no-referrer"),
        // The next version of the program has another page.
        (CACHE_CONTROL, "no-cache"),
    ];
    (headers, PAGE).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_has_one_script_and_one_style_sheet_and_nothing_from_elsewhere() {
        for element in ["script", "style"] {
            assert_eq!(PAGE.matches(&format!("<{element}")).count(), 1, "{element}");
            assert_ne!(hash(element), format!("sha256-{}", STANDARD.encode(Sha256::digest(""))), "{element}");
        }
        for forbidden in
            ["http:", "https:", "innerHTML", "insertAdjacentHTML", "document.write", " style=", " onclick="]
        {
            // The icon's namespace is a name, not an address.
            let page = PAGE.replace("http://www.w3.org/2000/svg", "");
            assert!(!page.contains(forbidden), "{forbidden}");
        }
    }
}
