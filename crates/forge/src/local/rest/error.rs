//! Errors in GitHub's form.

use axum::{
    Json,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

use crate::local::ForgeError;

const DOCUMENTATION: &str = "https://docs.github.com/rest";

/// An error answer. Its message never contains what a client sent as a credential.
#[derive(Debug)]
pub(super) struct RestError {
    status: StatusCode,
    message: String,
    errors: Vec<Value>,
}

impl RestError {
    pub(super) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), errors: Vec::new() }
    }

    pub(super) fn not_found() -> Self {
        Self::new(StatusCode::NOT_FOUND, "Not Found")
    }

    pub(super) fn unauthorized(message: &str) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, message)
    }

    pub(super) fn forbidden(message: &str) -> Self {
        Self::new(StatusCode::FORBIDDEN, message)
    }

    /// The credential is valid but lacks a permission.
    pub(super) fn no_permission() -> Self {
        Self::forbidden("Resource not accessible by integration")
    }

    pub(super) fn conflict(message: &str) -> Self {
        Self::new(StatusCode::CONFLICT, message)
    }

    pub(super) fn unprocessable(message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNPROCESSABLE_ENTITY, message)
    }

    /// A field of the request is wrong. `code` is one of GitHub's: `missing_field`, `invalid`.
    pub(super) fn field(resource: &str, field: &str, code: &str) -> Self {
        let mut error = Self::unprocessable("Validation Failed");
        error.errors.push(json!({"resource": resource, "field": field, "code": code}));
        error
    }

    /// The request contradicts the state of a resource.
    pub(super) fn custom(resource: &str, message: &str) -> Self {
        let mut error = Self::unprocessable("Validation Failed");
        error.errors.push(json!({"resource": resource, "code": "custom", "message": message}));
        error
    }
}

impl IntoResponse for RestError {
    fn into_response(self) -> Response {
        let mut body = json!({
            "message": self.message,
            "documentation_url": DOCUMENTATION,
            "status": self.status.as_str(),
        });
        if !self.errors.is_empty() {
            body["errors"] = self.errors.into();
        }
        (self.status, Json(body)).into_response()
    }
}

impl From<ForgeError> for RestError {
    fn from(error: ForgeError) -> Self {
        match error {
            ForgeError::NoRepository { .. }
            | ForgeError::NoPullRequest { .. }
            | ForgeError::NoApp { .. }
            | ForgeError::InvalidName(_) => Self::not_found(),
            error => {
                tracing::warn!(error = &error as &dyn std::error::Error, "the forge failed");
                Self::new(StatusCode::INTERNAL_SERVER_ERROR, "Server Error")
            }
        }
    }
}
