//! Text frames (JSON) on the WebSocket of a terminal or a command. Binary frames carry the bytes.

use serde::{Deserialize, Serialize};

use super::ExecRequest;
use crate::bridge::Exit;

/// First byte of a binary frame that carries a command's stdout. Terminal frames have no such byte.
pub const STDOUT: u8 = 1;

/// First byte of a binary frame that carries a command's stderr.
pub const STDERR: u8 = 2;

/// A text frame of the client. Binary frames of the client are the command's stdin.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum SocketIn {
    /// The command to run: the first frame on a command's socket, and only there. Its `stdin` must
    /// be absent.
    Start(ExecRequest),
    /// The terminal was resized.
    Resize {
        /// New height in rows.
        rows: u16,
        /// New width in columns.
        cols: u16,
    },
    /// End of stdin.
    End {},
}

/// A text frame of the server. Always the last frame.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum SocketOut {
    /// The command ended.
    Exited {
        /// Exit status.
        exit: Exit,
        /// Duration of the command.
        millis: u64,
    },
    /// The command could not be started, or its result is unknown.
    Failed {
        /// Error code for programs.
        code: String,
        /// Error message for people.
        message: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_frames_are_objects_with_one_key() {
        let resize = serde_json::to_string(&SocketIn::Resize { rows: 24, cols: 80 }).unwrap();
        assert_eq!(resize, r#"{"resize":{"rows":24,"cols":80}}"#);
        assert_eq!(serde_json::from_str::<SocketIn>(r#"{"end":{}}"#).unwrap(), SocketIn::End {});
        let exited =
            serde_json::to_string(&SocketOut::Exited { exit: Exit::Code(3), millis: 5 }).unwrap();
        assert_eq!(exited, r#"{"exited":{"exit":{"how":"code","value":3},"millis":5}}"#);
    }
}
