{{- define "pdkv.fullname" -}}
{{- ternary .Release.Name (printf "%s-pdkv" .Release.Name) (contains "pdkv" .Release.Name) | trunc 30 | trimSuffix "-" -}}
{{- end -}}

{{/* Labels by which objects and pods are found; `component`: router, or the name of a set of engines. */}}
{{- define "pdkv.selector" -}}
app.kubernetes.io/name: pdkv
app.kubernetes.io/instance: {{ .top.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "pdkv.labels" -}}
{{ include "pdkv.selector" . }}
app.kubernetes.io/version: {{ .top.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .top.Release.Service }}
helm.sh/chart: {{ .top.Chart.Name }}-{{ .top.Chart.Version }}
{{- end -}}

{{/* The pods of all engines, or of all of the release. */}}
{{- define "pdkv.engine-pods" -}}
matchLabels:
  app.kubernetes.io/instance: {{ .Release.Name }}
  pdkv/engine: "true"
{{- end -}}

{{/* Sets of engines: `engine`, and over it what the set says itself. As JSON: a template returns text. */}}
{{- define "pdkv.engines" -}}
{{- $sets := dict -}}
{{- range $name, $own := .Values.engines -}}
{{- if $own -}}{{- $_ := set $sets $name (mergeOverwrite (deepCopy $.Values.engine) (deepCopy $own)) -}}{{- end -}}
{{- end -}}
{{- toJson $sets -}}
{{- end -}}

{{/* Options by name, as items of a list of arguments. */}}
{{- define "pdkv.options" -}}
{{- range $name, $value := . }}
{{- if kindIs "bool" $value }}
- {{ ternary "--" "--no-" $value }}{{ $name }}
{{- else }}
- --{{ $name }}
{{- range (ternary $value (list $value) (kindIs "slice" $value)) }}
- {{ and (kindIs "float64" .) (eq (floor .) .) | ternary (int64 . | toString) (toString .) | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Arguments of router and engines alike. */}}
{{- define "pdkv.common" -}}
- --cluster-key-file
- /etc/pdkv/cluster/cluster.key
{{- with .Values.model.name }}
- --model
- {{ . | quote }}
{{- end }}
{{- with .Values.kvStore.existingSecret }}
- --kv-store
- "@/etc/pdkv/store/url"
{{- end }}
{{- include "pdkv.options" .Values.options }}
{{- with .Values.connectorConfig }}
- --connector-config
{{- range $key, $value := . }}
- {{ printf "%s=%v" $key $value | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Threads per rank: the processors that a pod asks for, of which the process would otherwise take all of the node's. */}}
{{- define "pdkv.threads" -}}
{{- $cpu := dig "requests" "cpu" "1" .resources | toString -}}
{{- $cpus := hasSuffix "m" $cpu | ternary (div (trimSuffix "m" $cpu) 1000) (int $cpu) -}}
{{- max 1 (div $cpus (dig "tp" 1 .options)) -}}
{{- end -}}

{{- define "pdkv.cluster-secret" -}}
{{ .Values.clusterKey.existingSecret | default (printf "%s-cluster" (include "pdkv.fullname" .)) }}
{{- end -}}

{{/* The part of a pod's spec that does not depend on what it runs. `own`: the router's values, or a set's. */}}
{{- define "pdkv.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false  # a service "pdkv" would set PDKV_PORT, which is an option
{{- with .top.Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .top.Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
securityContext: {{- toYaml .top.Values.podSecurityContext | nindent 2 }}
{{- with .own.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .own.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .own.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- else }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "pdkv.selector" . | nindent 8 }}
{{- end }}
volumes:
  - name: tmp
    emptyDir: {}
  - name: cluster
    secret: {secretName: {{ include "pdkv.cluster-secret" .top }}, defaultMode: 0400}
  {{- with .own.sharedMemory }}
  - name: shm
    emptyDir: {medium: Memory, sizeLimit: {{ . }}}
  {{- end }}
  {{- with .top.Values.model.volume }}
  - name: models {{- toYaml . | nindent 4 }}
  {{- end }}
  - name: cache {{- toYaml (.top.Values.model.cache | default (dict "emptyDir" dict)) | nindent 4 }}
  {{- with .top.Values.kvStore.existingSecret }}
  - name: store
    secret: {secretName: {{ . }}, defaultMode: 0400}
  {{- end }}
  {{- if eq .component "router" }}
  {{- with .top.Values.apiKeys.existingSecret }}
  - name: keys
    secret: {secretName: {{ . }}, defaultMode: 0400}
  {{- end }}
  {{- with .top.Values.tls.existingSecret }}
  - name: tls
    secret: {secretName: {{ . }}, defaultMode: 0400}
  {{- end }}
  {{- end }}
{{- end -}}

{{/* The part of a container that does not depend on what it runs. */}}
{{- define "pdkv.container" -}}
image: {{ printf "%s:%s" .top.Values.image.repository (.top.Values.image.tag | default .top.Chart.AppVersion) | quote }}
imagePullPolicy: {{ .top.Values.image.pullPolicy }}
securityContext: {{- toYaml .top.Values.securityContext | nindent 2 }}
resources: {{- toYaml .own.resources | nindent 2 }}
env:
  - name: POD_NAME
    valueFrom: {fieldRef: {fieldPath: metadata.name}}
  - name: POD_IP
    valueFrom: {fieldRef: {fieldPath: status.podIP}}
  - {name: HOME, value: /tmp}
  - {name: HF_HOME, value: /cache}
  {{- with .top.Values.env }}{{ toYaml . | nindent 2 }}{{ end }}
volumeMounts:
  - {name: tmp, mountPath: /tmp}
  - {name: cluster, mountPath: /etc/pdkv/cluster, readOnly: true}
  - {name: cache, mountPath: /cache}
  {{- if .own.sharedMemory }}
  - {name: shm, mountPath: /dev/shm}
  {{- end }}
  {{- if .top.Values.model.volume }}
  - {name: models, mountPath: /models, readOnly: true}
  {{- end }}
  {{- if .top.Values.kvStore.existingSecret }}
  - {name: store, mountPath: /etc/pdkv/store, readOnly: true}
  {{- end }}
  {{- if eq .component "router" }}
  {{- if .top.Values.apiKeys.existingSecret }}
  - {name: keys, mountPath: /etc/pdkv/keys, readOnly: true}
  {{- end }}
  {{- if .top.Values.tls.existingSecret }}
  - {name: tls, mountPath: /etc/pdkv/tls, readOnly: true}
  {{- end }}
  {{- end }}
{{- end -}}

{{- define "pdkv.metadata" -}}
metadata:
  name: {{ include "pdkv.fullname" .top }}-{{ .component }}
  labels: {{- include "pdkv.labels" . | nindent 4 }}
{{- end -}}

{{- define "pdkv.budget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
{{ include "pdkv.metadata" . }}
spec:
  maxUnavailable: {{ .own.maxUnavailable | default 1 }}
  selector:
    matchLabels: {{- include "pdkv.selector" . | nindent 6 }}
{{- end -}}
