//! The path of a request with the template of its route.

use axum::{
    extract::{MatchedPath, Request},
    http::{Extensions, Uri},
};

pub(crate) struct RoutePath {
    /// Parameters are in braces.
    template: String,
    path: String,
}

impl RoutePath {
    pub(crate) fn new(extensions: &Extensions, uri: &Uri) -> Self {
        let template = extensions.get::<MatchedPath>().map_or("", MatchedPath::as_str);
        Self { template: template.to_owned(), path: uri.path().to_owned() }
    }

    pub(crate) fn of(request: &Request) -> Self {
        Self::new(request.extensions(), request.uri())
    }

    /// The segment of this parameter, not decoded.
    pub(crate) fn parameter(&self, name: &str) -> Option<&str> {
        let at = self.template.split('/').position(|segment| segment == name)?;
        self.path.split('/').nth(at)
    }
}
