//! No doors and no forge.

use std::{any::Any, sync::Arc};

use async_trait::async_trait;
use harvest_gateway::{
    DoorListener, DoorObserver,
    ledger::{DoorPolicy, Tools},
};
use harvest_proto::api::{Evidence, PullRequest};
use harvest_session::{Doors, Forge, ForgeFailure, PullRequestSpec};

pub(super) struct Stubs;

impl Doors for Stubs {
    fn open(
        &self,
        _: Box<dyn DoorListener>,
        _: DoorPolicy,
        _: Option<DoorObserver>,
        _: Option<Arc<dyn Tools>>,
    ) -> Box<dyn Any + Send> {
        Box::new(())
    }
}

#[async_trait]
impl Forge for Stubs {
    async fn open_pull_request(
        &self,
        _: PullRequestSpec,
    ) -> Result<Option<PullRequest>, ForgeFailure> {
        Ok(None)
    }

    async fn set_evidence(&self, _: &str, _: u64, _: Evidence) -> Result<(), ForgeFailure> {
        Ok(())
    }
}
