//! Changes of the member list, asked of etcd.

use crate::execute::{Actor, Error};
use crate::write::Write;

impl Actor<'_> {
    pub(super) async fn change_members(&self, write: &Write, via: &[String]) -> Result<(), Error> {
        let answer = match write {
            Write::AddMember { member, learner } => {
                let url = self.members().addresses().peer_url(member);
                match self.etcd.add_member(via, &[url], *learner).await {
                    // An earlier addition whose answer was lost.
                    Err(etcd::Error::PeerUrlExists) => Ok(()),
                    answer => answer.map(|_| ()),
                }
            }
            Write::UpdatePeerUrls { id, urls, .. } => self.etcd.update_member(via, *id, urls).await,
            Write::Promote { id, .. } => self.etcd.promote_member(via, *id).await,
            Write::Remove { id, .. } => match self.etcd.remove_member(via, *id).await {
                Err(etcd::Error::MemberNotFound) => Ok(()),
                answer => answer,
            },
            Write::MoveLeader { from, id, .. } => {
                self.etcd.move_leader(&self.client_url(from), *id).await
            }
            Write::Downgrade { to } => self.etcd.downgrade(via, to.as_deref()).await,
            _ => Ok(()),
        };
        answer.map_err(|source| Error::Etcd {
            what: write.to_string(),
            source,
        })
    }
}
